# A stand-in for an orchestrator: one task per worker, again and again.
set -eu
number=0
while :; do
    number=$((number + 1))
    for worker in worker-1 worker-2; do
        # Complete under another name first: a worker never sees half a task.
        printf 'echo "task %s: $((6 * 7))"\n' "$number" >"/tasks/.$worker.new"
        mv "/tasks/.$worker.new" "/tasks/$worker.sh"
    done
    sleep 60
done
