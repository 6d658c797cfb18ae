"""Which system calls a sandbox may make: the audited table of Linux 6.18. Pure.

Every call of that kernel is in one of the two tables; a number that is in neither does not exist
for the command (ENOSYS), so a call of a later kernel is closed until somebody has looked at it.
The tables are texts, since a start loads a text faster than a thousand values.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

# Columns of numbers; `-` where a machine has no such call.
MACHINES = ("x86_64", "aarch64")
ALLOW = "ALLOW"

# Call, its numbers, verdict at level "default" (and at level "strict" if that is another), reason.
# A verdict is ALLOW, the name of an error, or the name of a check of arguments in `seccomp`.
JUDGED = """
# Terminal and processes.
ioctl                    16  29 terminal             types into the caller's terminal
ptrace                  101 117 pid1:1/EPERM         reaches pid 1, bwrap; strict: any process
process_vm_readv        310 270 pid1:0/EPERM         as ptrace
process_vm_writev       311 271 pid1:0/EPERM         as ptrace
pidfd_getfd             438 438 EPERM                takes descriptors of others, of pid 1 too
kcmp                    312 272 ALLOW/EPERM          compares other processes' kernel objects
process_madvise         440 440 ALLOW/EPERM          acts on other processes' memory
process_mrelease        448 448 ALLOW/EPERM          acts on other processes' memory
name_to_handle_at       303 264 ALLOW/EPERM          half of a way around paths
personality             135  92 ALLOW/personality    switches off protections of memory
setpriority             141 140 group:1              slows the caller's group down, too
ioprio_set              251  30 group:2              as setpriority
# Namespaces.
clone                    56 220 namespaces           more kernel code opens in a new namespace
clone3                  435 435 ENOSYS               flags behind a pointer; libc then uses clone
unshare                 272  97 namespaces+time      as clone
setns                   308 268 EPERM                joins other namespaces
# Large or young subsystems that took part in many escapes.
io_uring_setup          425 425 ENOSYS               its requests pass no filter
io_uring_enter          426 426 ENOSYS               as io_uring_setup
io_uring_register       427 427 ENOSYS               as io_uring_setup
bpf                     321 280 EPERM                programs for the kernel
perf_event_open         298 241 EPERM                large, and sees more than the sandbox
userfaultfd             323 282 EPERM                holds the kernel still amid an operation
fanotify_init           300 262 EPERM                watches whole file systems
fanotify_mark           301 263 EPERM                as fanotify_init
memfd_secret            447 447 ALLOW/ENOSYS         seldom used
io_setup                206   0 ALLOW/ENOSYS         old; programs fall back
remap_file_pages        216 234 ALLOW/ENOSYS         deprecated
statmount               457 457 ALLOW/ENOSYS         young; programs fall back to /proc
listmount               458 458 ALLOW/ENOSYS         as statmount
cachestat               451 451 ALLOW/ENOSYS         tells what is in the page cache
lsm_set_self_attr       460 460 ALLOW/EPERM          seldom used
mbind                   237 235 ALLOW/EPERM          memory policy; seldom used
set_mempolicy           238 237 ALLOW/EPERM          as mbind
set_mempolicy_home_node 450 450 ALLOW/EPERM          as mbind
migrate_pages           256 238 ALLOW/EPERM          as mbind
move_pages              279 239 ALLOW/EPERM          as mbind
# Keyrings are shared by all processes of a user, whatever their namespaces.
add_key                 248 217 EPERM                keys of the user
request_key             249 218 EPERM                keys of the user
keyctl                  250 219 EPERM                keys of the user
# Mounts: every one of the sandbox is made before the command starts.
mount                   165  40 EPERM                mounts
umount2                 166  39 EPERM                mounts
pivot_root              155  41 EPERM                mounts
chroot                  161  51 EPERM                another root
move_mount              429 429 EPERM                mounts
open_tree               428 428 EPERM                mounts
open_tree_attr          467 467 EPERM                mounts
fsopen                  430 430 EPERM                mounts; file systems parsed in the kernel
fsconfig                431 431 EPERM                mounts
fsmount                 432 432 EPERM                mounts
fspick                  433 433 EPERM                mounts
mount_setattr           442 442 EPERM                mounts
open_by_handle_at       304 265 EPERM                opens files past every path and mount
# Sockets.
socket                   41 198 socket/socket-strict a family is a kernel subsystem
socketpair               53 199 pair/pair-strict     programs need pairs of unix sockets only
# Set-user-id: run by root, a sandbox could leave a root program for the host's other users.
chmod                    90   - suid:1               a set-user-id program
fchmod                   91  52 suid:1               a set-user-id program
fchmodat                268  53 suid:2               a set-user-id program
fchmodat2               452 452 suid:2               a set-user-id program
open                      2   - creates-suid:1       a set-user-id program
openat                  257  56 creates-suid:2       a set-user-id program
openat2                 437 437 ENOSYS               mode behind a pointer; openat does as well
creat                    85   - suid:1               a set-user-id program
mknod                   133   - suid:1               a set-user-id program
mknodat                 259  33 suid:2               a set-user-id program
# The machine as a whole. The kernel asks for a capability, too.
kexec_load              246 104 EPERM                another kernel
kexec_file_load         320 294 EPERM                another kernel
init_module             175 105 EPERM                kernel modules
finit_module            313 273 EPERM                kernel modules
delete_module           176 106 EPERM                kernel modules
reboot                  169 142 EPERM                the machine
syslog                  103 116 EPERM                the kernel's log, with its addresses
acct                    163  89 EPERM                accounting of all processes
swapon                  167 224 EPERM                swap
swapoff                 168 225 EPERM                swap
quotactl                179  60 EPERM                disk quotas
quotactl_fd             443 443 EPERM                disk quotas
settimeofday            164 170 EPERM                the clock
clock_settime           227 112 EPERM                the clock
adjtimex                159 171 ALLOW/EPERM          the clock; reading it is allowed by default
clock_adjtime           305 266 ALLOW/EPERM          as adjtimex
sethostname             170 161 EPERM                the host's name
setdomainname           171 162 EPERM                the host's name
vhangup                 153  58 EPERM                the terminal
iopl                    172   - EPERM                ports of the hardware
ioperm                  173   - EPERM                ports of the hardware
modify_ldt              154   - EPERM                16-bit code; has leaked kernel memory
# Obsolete: no current program needs them, and most kernels have no code for them.
_sysctl                 156   - ENOSYS               obsolete
afs_syscall             183   - ENOSYS               obsolete
create_module           174   - ENOSYS               obsolete
epoll_ctl_old           214   - ENOSYS               obsolete
epoll_wait_old          215   - ENOSYS               obsolete
get_kernel_syms         177   - ENOSYS               obsolete
get_thread_area         211   - ENOSYS               obsolete
getpmsg                 181   - ENOSYS               obsolete
lookup_dcookie          212  18 ENOSYS               obsolete
nfsservctl              180  42 ENOSYS               obsolete
putpmsg                 182   - ENOSYS               obsolete
query_module            178   - ENOSYS               obsolete
security                185   - ENOSYS               obsolete
set_thread_area         205   - ENOSYS               obsolete
sysfs                   139   - ENOSYS               obsolete
tuxcall                 184   - ENOSYS               obsolete
uselib                  134   - ENOSYS               obsolete
ustat                   136   - ENOSYS               obsolete
vserver                 236   - ENOSYS               obsolete
"""

# Calls without a verdict of their own: plain files, memory, time, signals, processes, sockets that
# are open already, and what only ever tightens (seccomp, Landlock, sealing).
ALLOWED = """
accept 43 202, accept4 288 242, access 21 -, alarm 37 -, arch_prctl 158 -, bind 49 200,
brk 12 214, capget 125 90, capset 126 91, chdir 80 49, chown 92 -, clock_getres 229 114,
clock_gettime 228 113, clock_nanosleep 230 115, close 3 57, close_range 436 436, connect 42 203,
copy_file_range 326 285, dup 32 23, dup2 33 -, dup3 292 24, epoll_create 213 -,
epoll_create1 291 20, epoll_ctl 233 21, epoll_pwait 281 22, epoll_pwait2 441 441,
epoll_wait 232 -, eventfd 284 -, eventfd2 290 19, execve 59 221, execveat 322 281, exit 60 93,
exit_group 231 94, faccessat 269 48, faccessat2 439 439, fadvise64 221 223, fallocate 285 47,
fchdir 81 50, fchown 93 55, fchownat 260 54, fcntl 72 25, fdatasync 75 83, fgetxattr 193 10,
file_getattr 468 468, file_setattr 469 469, flistxattr 196 13, flock 73 32, fork 57 -,
fremovexattr 199 16, fsetxattr 190 7, fstat 5 80, fstatfs 138 44, fsync 74 82, ftruncate 77 46,
futex 202 98, futex_requeue 456 456, futex_wait 455 455, futex_waitv 449 449, futex_wake 454 454,
futimesat 261 -, get_mempolicy 239 236, get_robust_list 274 100, getcpu 309 168, getcwd 79 17,
getdents 78 -, getdents64 217 61, getegid 108 177, geteuid 107 175, getgid 104 176,
getgroups 115 158, getitimer 36 102, getpeername 52 205, getpgid 121 155, getpgrp 111 -,
getpid 39 172, getppid 110 173, getpriority 140 141, getrandom 318 278, getresgid 120 150,
getresuid 118 148, getrlimit 97 163, getrusage 98 165, getsid 124 156, getsockname 51 204,
getsockopt 55 209, gettid 186 178, gettimeofday 96 169, getuid 102 174, getxattr 191 8,
getxattrat 464 464, inotify_add_watch 254 27, inotify_init 253 -, inotify_init1 294 26,
inotify_rm_watch 255 28, io_cancel 210 3, io_destroy 207 1, io_getevents 208 4,
io_pgetevents 333 292, io_submit 209 2, ioprio_get 252 31, kill 62 129,
landlock_add_rule 445 445, landlock_create_ruleset 444 444, landlock_restrict_self 446 446,
lchown 94 -, lgetxattr 192 9, link 86 -, linkat 265 37, listen 50 201, listxattr 194 11,
listxattrat 465 465, llistxattr 195 12, lremovexattr 198 15, lseek 8 62, lsetxattr 189 6,
lsm_get_self_attr 459 459, lsm_list_modules 461 461, lstat 6 -, madvise 28 233,
map_shadow_stack 453 453, membarrier 324 283, memfd_create 319 279, mincore 27 232, mkdir 83 -,
mkdirat 258 34, mlock 149 228, mlock2 325 284, mlockall 151 230, mmap 9 222, mprotect 10 226,
mq_getsetattr 245 185, mq_notify 244 184, mq_open 240 180, mq_timedreceive 243 183,
mq_timedsend 242 182, mq_unlink 241 181, mremap 25 216, mseal 462 462, msgctl 71 187,
msgget 68 186, msgrcv 70 188, msgsnd 69 189, msync 26 227, munlock 150 229, munlockall 152 231,
munmap 11 215, nanosleep 35 101, newfstatat 262 79, pause 34 -, pidfd_open 434 434,
pidfd_send_signal 424 424, pipe 22 -, pipe2 293 59, pkey_alloc 330 289, pkey_free 331 290,
pkey_mprotect 329 288, poll 7 -, ppoll 271 73, prctl 157 167, pread64 17 67, preadv 295 69,
preadv2 327 286, prlimit64 302 261, pselect6 270 72, pwrite64 18 68, pwritev 296 70,
pwritev2 328 287, read 0 63, readahead 187 213, readlink 89 -, readlinkat 267 78, readv 19 65,
recvfrom 45 207, recvmmsg 299 243, recvmsg 47 212, removexattr 197 14, removexattrat 466 466,
rename 82 -, renameat 264 38, renameat2 316 276, restart_syscall 219 128, rmdir 84 -,
rseq 334 293, rt_sigaction 13 134, rt_sigpending 127 136, rt_sigprocmask 14 135,
rt_sigqueueinfo 129 138, rt_sigreturn 15 139, rt_sigsuspend 130 133, rt_sigtimedwait 128 137,
rt_tgsigqueueinfo 297 240, sched_get_priority_max 146 125, sched_get_priority_min 147 126,
sched_getaffinity 204 123, sched_getattr 315 275, sched_getparam 143 121,
sched_getscheduler 145 120, sched_rr_get_interval 148 127, sched_setaffinity 203 122,
sched_setattr 314 274, sched_setparam 142 118, sched_setscheduler 144 119, sched_yield 24 124,
seccomp 317 277, select 23 -, semctl 66 191, semget 64 190, semop 65 193, semtimedop 220 192,
sendfile 40 71, sendmmsg 307 269, sendmsg 46 211, sendto 44 206, set_robust_list 273 99,
set_tid_address 218 96, setfsgid 123 152, setfsuid 122 151, setgid 106 144, setgroups 116 159,
setitimer 38 103, setpgid 109 154, setregid 114 143, setresgid 119 149,
setresuid 117 147, setreuid 113 145, setrlimit 160 164, setsid 112 157, setsockopt 54 208,
setuid 105 146, setxattr 188 5, setxattrat 463 463, shmat 30 196, shmctl 31 195, shmdt 67 197,
shmget 29 194, shutdown 48 210, sigaltstack 131 132, signalfd 282 -, signalfd4 289 74,
splice 275 76, stat 4 -, statfs 137 43, statx 332 291, symlink 88 -, symlinkat 266 36,
sync 162 81, sync_file_range 277 84, syncfs 306 267, sysinfo 99 179, tee 276 77, tgkill 234 131,
time 201 -, timer_create 222 107, timer_delete 226 111, timer_getoverrun 225 109,
timer_gettime 224 108, timer_settime 223 110, timerfd_create 283 85, timerfd_gettime 287 87,
timerfd_settime 286 86, times 100 153, tkill 200 130, truncate 76 45, umask 95 166, uname 63 160,
unlink 87 -, unlinkat 263 35, uprobe 336 -, uretprobe 335 -, utime 132 -, utimensat 280 88,
utimes 235 -, vfork 58 -, vmsplice 278 75, wait4 61 260, waitid 247 95, write 1 64, writev 20 66,
"""


def verdicts(machine: str, *, strict: bool) -> dict[int, str]:
    """The verdict on each number that a machine has a call for."""
    column = 1 + MACHINES.index(machine)
    found = {int(number): ALLOW for _, number in _allowed(column)}
    for row in judged():
        if row[column] != "-":
            usual, _, narrow = row[3].partition("/")
            found[int(row[column])] = (strict and narrow) or usual
    return found


def numbers(machine: str) -> dict[str, int]:
    """Every call that a machine has, by its name."""
    column = 1 + MACHINES.index(machine)
    rows = [(row[0], row[column]) for row in judged() if row[column] != "-"]
    return {name: int(number) for name, number in (*_allowed(column), *rows)}


def judged() -> Iterator[list[str]]:
    """The rows of JUDGED: call, two numbers, verdicts, reason."""
    for line in JUDGED.splitlines():
        if line and line[0] != "#":
            yield line.split(None, 4)


def _allowed(column: int) -> list[tuple[str, str]]:
    words = ALLOWED.replace(",", "").split()
    found = zip(words[::3], words[column::3], strict=True)
    return [(name, number) for name, number in found if number != "-"]
