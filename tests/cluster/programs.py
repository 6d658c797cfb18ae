"""Command lines and settings of the programs of the test cluster: pure, and most of it a table."""

from __future__ import annotations

from pathlib import Path

from agent_sandbox.record import Record

# 64 clusters may run on one machine: each has a /16 of the range that is not for the internet.
FIRST = 64
CLUSTERS = 64
CNI = "/usr/lib/cni"
SOCKET = "unix:///run/containerd/containerd.sock"
# A node that does not report for so long is lost. Kubernetes' own default is 40.
GRACE_SECONDS = 20
# How long a pod stays on such a node. Kubernetes' own default is 300.
TOLERATION_SECONDS = 2
MAX_PODS = 300
GATES = "ProcMountType=true"


class Network(Record):
    """The addresses of one cluster."""

    number: int

    @property
    def prefix(self) -> str:
        """The first half of every address."""
        return f"100.{FIRST + self.number}"

    @property
    def host(self) -> str:
        """This machine, as the cluster sees it."""
        return f"{self.prefix}.0.1"

    @property
    def control(self) -> str:
        """The API server, on port 443."""
        return f"{self.prefix}.0.2"

    @property
    def service(self) -> str:
        """The API server as pods know it."""
        return f"{self.prefix}.128.1"

    @property
    def services(self) -> str:
        """Where services have addresses. Nothing serves there but the API server."""
        return f"{self.prefix}.128.0/20"

    def node(self, index: int) -> str:
        """A node."""
        return f"{self.prefix}.0.{10 + index}"

    def pods(self, index: int) -> str:
        """The pods of a node."""
        return f"{self.prefix}.{4 * index}.0/22"

    @property
    def link(self) -> str:
        """This machine's device."""
        return f"agsbx-k{self.number}"


def etcd(data: str) -> list[str]:
    """Keeps its state in memory: data is a tmpfs."""
    client, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
    return [
        "etcd", f"--data-dir={data}", f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}", f"--listen-peer-urls={peer}",
        "--snapshot-count=5000", "--log-level=warn", "--logger=zap",
    ]  # fmt: skip


def apiserver(programs: Path, keys: Path, net: Network, *, alone: bool) -> list[str]:
    """With node authorisation and RBAC, as a real one."""
    flags = {
        "advertise-address": net.control,
        "allow-privileged": "true",
        "authorization-mode": "Node,RBAC",
        "client-ca-file": keys / "ca.crt",
        "default-not-ready-toleration-seconds": TOLERATION_SECONDS,
        "default-unreachable-toleration-seconds": TOLERATION_SECONDS,
        "enable-admission-plugins": "NodeRestriction",
        "etcd-servers": "http://127.0.0.1:2379",
        "event-ttl": "10m",
        "feature-gates": GATES,
        "kubelet-certificate-authority": keys / "ca.crt",
        "kubelet-client-certificate": keys / "admin.crt",
        "kubelet-client-key": keys / "admin.key",
        "kubelet-preferred-address-types": "InternalIP",
        "secure-port": 443,
        "service-account-issuer": "https://kubernetes.default.svc",
        "service-account-key-file": keys / "accounts.pub",
        "service-account-signing-key-file": keys / "accounts.key",
        "service-cluster-ip-range": net.services,
        "tls-cert-file": keys / "apiserver.crt",
        "tls-private-key-file": keys / "apiserver.key",
    }
    if alone:
        # Nobody makes service accounts, and without one no pod could be made.
        flags["disable-admission-plugins"] = "ServiceAccount"
    return _flagged(programs / "kube-apiserver", flags)


def controllers(programs: Path, keys: Path, config: Path) -> list[str]:
    """All but what only a cloud has."""
    return _flagged(
        programs / "kube-controller-manager",
        {
            "concurrent-gc-syncs": 5,
            "controllers": "*,-attachdetach,-persistentvolume-binder,-persistentvolume-expander,"
            "-pv-protection,-pvc-protection,-csrapproving,-csrcleaner,-csrsigning,-nodeipam",
            "kube-api-burst": 200,
            "kube-api-qps": 100,
            "kubeconfig": config,
            "leader-elect": "false",
            # One node of two is half of a zone: no careful tenth of a node per second here.
            "node-eviction-rate": 10,
            "secondary-node-eviction-rate": 10,
            "node-monitor-grace-period": f"{GRACE_SECONDS}s",
            "node-monitor-period": "1s",
            "pod-eviction-timeout": f"{TOLERATION_SECONDS}s",
            "root-ca-file": keys / "ca.crt",
            "service-account-private-key-file": keys / "accounts.key",
            "terminated-pod-gc-threshold": 100,
            "use-service-account-credentials": "true",
        },
    )


def scheduler(programs: Path, config: Path) -> list[str]:
    """Its defaults."""
    return _flagged(
        programs / "kube-scheduler",
        {"kube-api-burst": 200, "kube-api-qps": 100, "kubeconfig": config, "leader-elect": "false"},
    )


def kubelet(programs: Path, base: Path, config: Path, name: str, ip: str) -> list[str]:
    """One node's."""
    return _flagged(
        programs / "kubelet",
        {
            "config": base / "kubelet.json",
            "container-runtime": "remote",
            "container-runtime-endpoint": SOCKET,
            "hostname-override": name,
            # The default of 10 s has each of 300 containers looked at all the time.
            "housekeeping-interval": "30s",
            "kubeconfig": config,
            "node-ip": ip,
            "root-dir": base / "kubelet",
            "seccomp-profile-root": base / "kubelet" / "seccomp",
        },
    )


def _flagged(program: Path, flags: dict[str, object]) -> list[str]:
    return [str(program), *(f"--{name}={value}" for name, value in flags.items())]


def kubelet_settings(keys: Path, name: str, group: str) -> dict[str, object]:
    """What kubelet takes from a file."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(keys / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "cgroupRoot": f"/{group}",
        "cgroupDriver": "cgroupfs",
        "eventRecordQPS": 50,
        "eventBurst": 100,
        # The tests' machine may have a full disk; what is tested are limits of pods.
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "0%",
            "nodefs.inodesFree": "0%",
            "imagefs.available": "0%",
        },
        "failSwapOn": False,
        "featureGates": {"ProcMountType": True},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "kubeAPIQPS": 100,
        "kubeAPIBurst": 200,
        "makeIPTablesUtilChains": False,
        "maxPods": MAX_PODS,
        "nodeLeaseDurationSeconds": GRACE_SECONDS,
        "nodeStatusUpdateFrequency": "1s",
        "oomScoreAdj": 0,
        "serializeImagePulls": False,
        "tlsCertFile": str(keys / f"{name}.crt"),
        "tlsPrivateKeyFile": str(keys / f"{name}.key"),
        # How soon a volume above its limit is seen.
        "volumeStatsAggPeriod": "10s",
    }


# The second handler is the same runtime: a RuntimeClass needs only a name that a node knows.
CONTAINERD = """\
version = 2
root = "{base}/containerd"
state = "/run/containerd"
disabled_plugins = [
  "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs",
  "io.containerd.internal.v1.opt", "io.containerd.internal.v1.tracing",
  "io.containerd.tracing.processor.v1.otlp",
]
[grpc]
address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{pause}"
restrict_oom_score_adj = true
disable_hugetlb_controller = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{cni}"
conf_dir = "{base}/cni"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.strict]
runtime_type = "io.containerd.runc.v2"
"""


def containerd_settings(base: Path, pause: str) -> str:
    """What containerd takes from a file."""
    return CONTAINERD.format(base=base, pause=pause, cni=CNI)


def cni_settings(pods: str) -> dict[str, object]:
    """A bridge in the node; addresses of pods are routed, never translated."""
    return {
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [
            {
                "type": "bridge",
                "bridge": "cni0",
                "isGateway": True,
                "ipMasq": False,
                "ipam": {
                    "type": "host-local",
                    "dataDir": "/run/cni",
                    "ranges": [[{"subnet": pods}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            }
        ],
    }
