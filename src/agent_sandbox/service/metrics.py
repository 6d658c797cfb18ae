"""Measurements as Prometheus reads them. Names of routes, not paths: no client makes new series."""

from __future__ import annotations

import os
from bisect import bisect_left

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .core.about import Counts

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
# What `core.context.MEASURES` names, as histograms.
MEASURES = {
    "create": "sandbox_create_seconds", "queue": "sandbox_exec_queue_seconds",
    "start": "sandbox_exec_start_seconds", "exec": "sandbox_exec_duration_seconds",
}  # fmt: skip
HELP = {
    "sandbox_http_requests_total": "Requests by route and status.",
    "sandbox_http_request_seconds": "Time until an answer begins.",
    "sandbox_denials_total": "Refusals by code.",
    "sandbox_create_seconds": "Time to make a sandbox.",
    "sandbox_exec_queue_seconds": "Time a command waited for a place.",
    "sandbox_exec_start_seconds": "Time to start a command.",
    "sandbox_exec_duration_seconds": "Time a command ran.",
    "sandbox_sandboxes": "Sandboxes by state.",
    "sandbox_lost_total": "Sandboxes that were gone without our doing.",
    "sandbox_execs_running": "Commands that run.",
    "sandbox_execs_queued": "Commands that wait for a place.",
    "sandbox_audit_seq": "The number of the newest audit record.",
    "sandbox_http_connections": "Open connections.",
    "process_resident_memory_bytes": "Memory of the service itself.",
    "process_open_fds": "Open descriptors of the service itself.",
}
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
PAGE = os.sysconf("SC_PAGE_SIZE")


class Histogram:
    """Counts by upper bound."""

    __slots__ = ("counts", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        """One more."""
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.sum += seconds

    def lines(self, name: str, labels: str = "") -> Iterable[str]:
        """Cumulative, as the format wants it."""
        total = 0
        comma = "," if labels else ""
        for bound, count in zip((*BUCKETS, "+Inf"), self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{{labels}{comma}le="{bound}"}} {total}'
        braced = f"{{{labels}}}" if labels else ""
        yield f"{name}_sum{braced} {self.sum:.6f}"
        yield f"{name}_count{braced} {total}"


class Metrics:
    """All counters of the process. Only the loop may use it."""

    def __init__(self) -> None:
        self._requests: dict[tuple[str, str, int], int] = {}
        self._times: dict[str, Histogram] = {}
        self._denials: dict[str, int] = {}
        self._measures = {name: Histogram() for name in MEASURES}

    def requested(self, method: str, route: str, status: int, seconds: float) -> None:
        """A request was answered. A method that nobody has is "other"."""
        key = (method if method in METHODS else "other", route, status)
        self._requests[key] = self._requests.get(key, 0) + 1
        self._times.setdefault(route, Histogram()).observe(seconds)

    def denied(self, code: str) -> None:
        """A request was refused."""
        self._denials[code] = self._denials.get(code, 0) + 1

    def observe(self, measure: str, seconds: float) -> None:
        """For the core."""
        if measure in self._measures:
            self._measures[measure].observe(seconds)

    def render(
        self, counts: Counts, gauges: Mapping[str, float],
        backends: Mapping[str, Mapping[str, float]] | None = None,
    ) -> str:  # fmt: skip
        """The whole page. `backends`: what each says of itself, by its name."""
        lines: list[str] = []
        _head(lines, "sandbox_http_requests_total", "counter")
        lines += [
            f'sandbox_http_requests_total{{method="{verb}",route="{route}",status="{status}"}} {n}'
            for (verb, route, status), n in sorted(self._requests.items())
        ]
        _head(lines, "sandbox_http_request_seconds", "histogram")
        for route, times in sorted(self._times.items()):
            lines += times.lines("sandbox_http_request_seconds", f'route="{route}"')
        _head(lines, "sandbox_denials_total", "counter")
        lines += [
            f'sandbox_denials_total{{code="{c}"}} {n}' for c, n in sorted(self._denials.items())
        ]
        for measure, name in MEASURES.items():
            _head(lines, name, "histogram")
            lines += self._measures[measure].lines(name)
        _head(lines, "sandbox_sandboxes", "gauge")
        lines += [
            f'sandbox_sandboxes{{state="{s}"}} {n}' for s, n in sorted(counts.sandboxes.items())
        ]
        _head(lines, "sandbox_lost_total", "counter")
        lines.append(f"sandbox_lost_total {counts.lost}")
        own: dict[str, float] = {
            "sandbox_execs_running": counts.running, "sandbox_execs_queued": counts.queued,
            **gauges, **process(),
        }  # fmt: skip
        for name, value in own.items():
            _head(lines, name, "gauge")
            lines.append(f"{name} {value}")
        for backend, numbers in (backends or {}).items():
            lines += _numbers(backend, numbers)
        return "\n".join(lines) + "\n"


def _numbers(backend: str, numbers: Mapping[str, float]) -> Iterable[str]:
    """What a backend says of itself: `pool_size{template="x"}` is sandbox_NAME_pool_size{…}."""
    last = ""
    # By name first: what belongs to one name must stand together.
    for own, series, value in sorted((s.partition("{")[0], s, n) for s, n in numbers.items()):
        name = f"sandbox_{backend}_{own}"
        if name != last:
            yield f"# HELP {name} Of the backend {backend}."
            yield f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}"
            last = name
        yield f"sandbox_{backend}_{series} {value:g}"


def _head(lines: list[str], name: str, kind: str) -> None:
    lines.append(f"# HELP {name} {HELP[name]}")
    lines.append(f"# TYPE {name} {kind}")


def process() -> dict[str, int]:
    """Memory and descriptors of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[1])
    return {
        "process_resident_memory_bytes": pages * PAGE,
        "process_open_fds": len(os.listdir("/proc/self/fd")) - 1,
    }
