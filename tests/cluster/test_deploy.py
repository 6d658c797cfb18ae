"""deploy/: what is shipped says what the code needs, and no more. Rendered, but not applied."""

from __future__ import annotations

import copy
import json
import re
import shlex
import shutil
import subprocess
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from agent_sandbox.service import limits, metrics
from agent_sandbox.service.backend import kube_claim_objects as resources
from agent_sandbox.service.backend import kube_images, kube_settings, pod_env
from agent_sandbox.service.backend.kube_objects import NETWORK
from conftest import ROOT

from . import calls, manifests
from .manifests import BASE, CHART, DEPLOY, PODS, SERVICE, kustomized, named, one, rendered

if TYPE_CHECKING:
    from pathlib import Path

BACKEND = ROOT / "src" / "agent_sandbox" / "service" / "backend"
PAGE = ROOT / "docs" / "kubernetes.md"


@pytest.fixture(scope="module")
def base() -> list[dict[str, Any]]:
    return kustomized(BASE)


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return rendered(home=tmp_path_factory.mktemp("helm"))


def granted(found: list[dict[str, Any]], kind: str) -> set[tuple[str, str]]:
    return {
        (resource, verb)
        for role in found if role["kind"] == kind
        for rule in role["rules"]
        for resource in rule["resources"] for verb in rule["verbs"]
    }  # fmt: skip


def container(found: list[dict[str, Any]]) -> dict[str, Any]:
    (only,) = one(found, "Deployment")["spec"]["template"]["spec"]["containers"]
    return dict(only)


def variables(found: list[dict[str, Any]]) -> dict[str, str]:
    return {e["name"]: e.get("value", "") for e in container(found)["env"]}


# --- rights


def test_the_role_has_exactly_the_verbs_that_the_code_uses(base: list[dict[str, Any]]) -> None:
    used = calls.made(BACKEND)
    nodes = {call for call in used if call[0] == "nodes"}
    assert granted(base, "ClusterRole") == nodes
    # The owner is in the manifests, so that the service need not make it.
    assert variables(base)["KUBERNETES_OWNER"] == "agent-sandbox-owner"
    assert granted(base, "Role") == used - nodes - {("configmaps", "create")}


def test_no_right_is_wider_than_its_namespace_and_groups(base: list[dict[str, Any]]) -> None:
    roles = [role for role in base if role["kind"] in ("Role", "ClusterRole")]
    assert len(roles) == 2
    for role in roles:
        for rule in role["rules"]:
            assert "*" not in {*rule["apiGroups"], *rule["resources"], *rule["verbs"]}
            assert "secrets" not in rule["resources"]
    assert one(base, "Role")["metadata"]["namespace"] == PODS
    groups = {g for rule in one(base, "Role")["rules"] for g in rule["apiGroups"]}
    assert groups == {"", resources.EXTENSIONS, resources.CORE}
    maps = [r for r in one(base, "Role")["rules"] if r["resources"] == ["configmaps"]]
    assert [r["resourceNames"] for r in maps] == [["agent-sandbox-owner"]]


def test_a_call_that_is_new_is_seen(tmp_path: Path) -> None:
    """A control of the reader of the source."""
    for path in BACKEND.glob("kube*.py"):
        (tmp_path / path.name).write_text(path.read_text())
    (tmp_path / "kube_more.py").write_text(
        'async def f(api):\n    await api.delete(api.path("secrets", "x"))\n'
    )
    assert calls.made(tmp_path) - calls.made(BACKEND) == {("secrets", "delete")}


# --- what runs


def confined(spec: dict[str, Any]) -> None:
    """Pod Security's `restricted`, and a read-only root."""
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    for only in (*spec["containers"], *spec["initContainers"]):
        assert only["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
    for volume in spec["volumes"]:
        assert not {"hostPath", "persistentVolumeClaim"} & set(volume)


def test_the_service_itself_is_confined(base: list[dict[str, Any]]) -> None:
    spec = one(base, "Deployment")["spec"]
    confined(spec["template"]["spec"])
    assert spec["replicas"] >= 2
    assert one(base, "PodDisruptionBudget")["spec"]["minAvailable"] < spec["replicas"]
    for namespace in (one(base, "Namespace", SERVICE), one(base, "Namespace", PODS)):
        labels = namespace["metadata"]["labels"]
        assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
        # By this label policies know the namespace; clusters before 1.21 do not set it.
        assert labels["kubernetes.io/metadata.name"] == namespace["metadata"]["name"]


def test_no_secret_is_in_a_manifest_or_in_the_environment(base: list[dict[str, Any]]) -> None:
    assert not [o for o in base if o["kind"] == "Secret"]
    assert "secretKeyRef" not in json.dumps(base)
    mounted = {
        v["secret"]["secretName"]: v["secret"]["defaultMode"]
        for v in one(base, "Deployment")["spec"]["template"]["spec"]["volumes"] if "secret" in v
    }  # fmt: skip
    assert mounted == dict.fromkeys(
        ("agent-sandbox-database", "agent-sandbox-tls", "agent-sandbox-tokens"), 0o440
    )


def test_every_variable_and_flag_is_one_that_the_service_knows(base: list[dict[str, Any]]) -> None:
    known = {row.variable for row in kube_settings.TABLE} | {
        "POD_IP", "SANDBOX_DATABASE_FILE", "TOKENS_DIR", "SANDBOX_PUBLIC_HOSTS", "ALLOWED_IMAGES",
    }  # fmt: skip
    assert set(variables(base)) <= known
    settings = kube_settings.load(variables(base))
    assert settings.namespace == PODS
    from agent_sandbox.cli import serve

    command, *words = container(base)["args"]
    assert command == "serve"
    assert set(serve.split(words)) >= {"--backend", "--listen", "--advertise", "--tls-key"}


# --- the network


def test_sandboxes_reach_nothing_unless_a_policy_says_so(base: list[dict[str, Any]]) -> None:
    nothing = one(base, "NetworkPolicy", "nothing")
    assert nothing["metadata"]["namespace"] == PODS
    assert nothing["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    (way_in,) = one(base, "NetworkPolicy", "agent-from-service")["spec"]["ingress"]
    assert way_in["ports"] == [{"protocol": "TCP", "port": pod_env.PORT}]
    (peer,) = way_in["from"]
    labels = one(base, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert peer["podSelector"]["matchLabels"] == labels
    assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": SERVICE}


def test_public_is_what_the_service_calls_public(base: list[dict[str, Any]]) -> None:
    public = one(base, "NetworkPolicy", "public")["spec"]
    assert public["podSelector"] == {"matchLabels": {NETWORK: "public"}}
    assert public["policyTypes"] == ["Egress"]
    assert public["egress"] == resources.egress("public")
    egress = [p for p in base if p["kind"] == "NetworkPolicy" and "egress" in p["spec"]]
    assert {p["metadata"]["name"] for p in egress} == {"public", "service"}


# --- the inner layer


def test_the_profile_differs_from_a_runtimes_default_where_it_says() -> None:
    profile = json.loads((DEPLOY / "seccomp" / "agent-sandbox.json").read_text())
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    allowed: dict[str, list[Any]] = {}
    for rule in profile["syscalls"]:
        if rule["action"] == "SCMP_ACT_ALLOW":
            for name in rule["names"]:
                allowed.setdefault(name, []).append(rule.get("args"))
    inner = {"clone", "unshare", "mount", "umount2", "pivot_root", "sethostname"}
    assert all(allowed[name] == [None] for name in inner)
    dangerous = {
        "bpf", "perf_event_open", "keyctl", "add_key", "request_key", "userfaultfd", "setns",
        "init_module", "finit_module", "kexec_load", "open_by_handle_at", "reboot", "swapon",
        "io_uring_setup", "clone3", "move_mount", "fsopen", "fsmount", "open_tree", "quotactl",
        "acct", "settimeofday", "nfsservctl", "lookup_dcookie", "iopl", "ioperm", "chroot",
        "process_vm_readv", "process_vm_writev", "kcmp", "syslog", "vhangup", "mount_setattr",
    }  # fmt: skip
    assert sorted(dangerous & set(allowed)) == []
    refused = [r for r in profile["syscalls"] if r["action"] == "SCMP_ACT_ERRNO"]
    assert refused == [{"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38}]
    assert all(args is not None for args in allowed["personality"])


def test_the_installer_of_the_profile_writes_one_file() -> None:
    spec = one(kustomized(DEPLOY / "seccomp"), "DaemonSet")["spec"]["template"]["spec"]
    paths = [v["hostPath"]["path"] for v in spec["volumes"] if "hostPath" in v]
    assert paths == ["/var/lib/kubelet/seccomp"]
    (only,) = spec["containers"]
    assert only["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert spec["automountServiceAccountToken"] is False


# --- the chart


def test_the_chart_and_the_base_are_the_same(
    base: list[dict[str, Any]], chart: list[dict[str, Any]]
) -> None:
    ours, theirs = named(copy.deepcopy(base)), named(copy.deepcopy(chart))
    # Helm makes the namespace that it installs into.
    del ours["Namespace", "", SERVICE]
    # kustomize names it by its content, and changes who uses it.
    (generated,) = [k for k in ours if k[0] == "ConfigMap" and k[1] == SERVICE]
    config = ours.pop(generated)
    mine = theirs.pop(("ConfigMap", SERVICE, "agent-sandbox"))
    assert set(mine["data"]) == set(config["data"]) == {"images.toml", "templates.toml"}
    for kind in ("ClusterRole", "ClusterRoleBinding"):
        moved = theirs.pop((kind, "", f"agent-sandbox-nodes-{SERVICE}"))
        moved["metadata"]["name"] = "agent-sandbox-nodes"
        if "roleRef" in moved:
            moved["roleRef"]["name"] = "agent-sandbox-nodes"
        theirs[kind, "", "agent-sandbox-nodes"] = moved
    pod = theirs["Deployment", SERVICE, "agent-sandbox"]["spec"]["template"]
    assert pod["metadata"].pop("annotations")
    (first,), (only,) = pod["spec"]["initContainers"], pod["spec"]["containers"]
    assert first["image"] == only["image"] == manifests.IMAGE
    first["image"] = only["image"] = "agent-sandbox"
    for variable in only["env"]:
        if variable["name"] == "KUBERNETES_AGENT_IMAGE":
            assert variable["value"] == manifests.AGENT
            variable["value"] = ""
    for volume in pod["spec"]["volumes"]:
        if volume["name"] == "config":
            volume["configMap"]["name"] = generated[2]
    assert set(ours) == set(theirs)
    for each, wanted in ours.items():
        assert theirs[each] == wanted, each


def test_the_charts_options_are_the_other_directories(tmp_path: Path) -> None:
    found = named(rendered(
        "--set", "quota.enabled=true,autoscaling.enabled=true,monitoring.enabled=true",
        home=tmp_path,
    ))  # fmt: skip
    assert "replicas" not in found["Deployment", SERVICE, "agent-sandbox"]["spec"]
    for extra in manifests.EXTRAS:
        for wanted in kustomized(DEPLOY / "kustomize" / extra):
            assert found[manifests.key(wanted)] == wanted


def test_the_charts_values_arrive(tmp_path: Path) -> None:
    values = {
        "networkPolicy": "enforced", "nameservers": ["1.1.1.1", "9.9.9.9"],
        "seccomp": "localhost/agent-sandbox.json", "runtimes": ["gvisor", "kata"],
        "requiredRuntime": "gvisor", "claims": "off", "env": {"MAX_SANDBOXES": "50"},
        "publicHosts": ["sandbox.example"], "allowedImages": ["base", "r.example/*"],
        "drainSeconds": 90,
        "templates": '[python]\nimage = "base"\n', "sandboxNamespace": {"name": "elsewhere"},
    }  # fmt: skip
    path = tmp_path / "values.yaml"
    path.write_text(json.dumps(values))
    found = rendered("--values", str(path), home=tmp_path)
    given = variables(found)
    settings = kube_settings.load(given)
    assert settings.runtimes == ("gvisor", "kata")
    assert settings.network_policy == "enforced"
    assert settings.namespace == "elsewhere"
    assert given["MAX_SANDBOXES"] == "50"
    assert limits.load(given).allowed_images == ("base", "r.example/*")
    assert given["REQUIRED_RUNTIME"] == "gvisor"
    assert given["SANDBOX_PUBLIC_HOSTS"].endswith(" sandbox.example")
    assert given["KUBERNETES_NAMESERVERS"] == "1.1.1.1,9.9.9.9"
    pod = one(found, "Deployment")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > 90
    assert "--drain-seconds=90" in container(found)["args"]
    config = one(found, "ConfigMap", "agent-sandbox")
    assert config["data"]["templates.toml"].strip() == values["templates"].strip()  # type: ignore[attr-defined]
    assert one(found, "Role")["metadata"]["namespace"] == "elsewhere"
    quiet = rendered("--set", "watchNodes=false", home=tmp_path)
    assert not [o for o in quiet if o["kind"].startswith("Cluster")]


def test_the_chart_asks_for_an_image(tmp_path: Path) -> None:
    done = subprocess.run(
        [manifests.helm(), "template", "x", CHART], capture_output=True, text=True, check=False,
        env={"HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode
    assert "image: REGISTRY/" in done.stderr


# --- the page


def page(language: str, has: str) -> str:
    """The one block of docs/kubernetes.md that has a text, with digests instead of their places."""
    fences = re.findall(r"^ *```(\w+)\n(.*?)^ *```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (found,) = [text for name, text in fences if name == language and has in text]
    return textwrap.dedent(found).replace("sha256:…", "sha256:" + "3" * 64)


def test_the_pages_command_makes_what_the_chart_makes(tmp_path: Path) -> None:
    words = shlex.split(page("sh", "helm install").replace("\\\n", " "))
    assert words[:4] == ["helm", "install", "agent-sandbox", "deploy/helm/agent-sandbox"]
    (tmp_path / "deploy").symlink_to(DEPLOY)
    images = tmp_path / "images.toml"
    images.write_text(page("toml", "[base]"))
    done = subprocess.run(
        [manifests.helm(), "template", *words[2:]], capture_output=True, text=True, check=False,
        cwd=tmp_path, env={"HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = manifests.documents(done.stdout)
    given = variables(found)
    assert kube_settings.load(given).agent_image.endswith("@sha256:" + "3" * 64)
    assert limits.load(given).allowed_images == ("base", "registry.example/team/*")
    assert container(found)["image"] == "registry.example/agent-sandbox@sha256:" + "3" * 64
    config = one(found, "ConfigMap", "agent-sandbox")
    assert config["data"]["images.toml"].strip() == images.read_text().strip()
    assert kube_images.Table(str(images)).read()


def test_the_pages_kustomization_makes_what_the_base_makes(tmp_path: Path) -> None:
    text = page("yaml", "kustomization.yaml of your own")
    remote = "github.com/YOU/agent-sandbox/deploy/kustomize"
    assert text.count(remote) == 2
    # kustomize takes no absolute paths, and none that lead out.
    shutil.copytree(DEPLOY / "kustomize", tmp_path / "kustomize")
    (described,) = manifests.documents(text.replace(remote, "kustomize"))
    # The kustomize in this kubectl is of 2019: directories are bases, and patches are in files.
    described["bases"] = described.pop("resources")
    (patch,) = described.pop("patches")
    (tmp_path / "patch.yaml").write_text(patch["patch"])
    described["patchesStrategicMerge"] = ["patch.yaml"]
    (tmp_path / "kustomization.yaml").write_text(json.dumps(described))
    found = kustomized(tmp_path)
    assert container(found)["image"] == "registry.example/agent-sandbox@sha256:" + "3" * 64
    assert kube_settings.load(variables(found)).agent_image.endswith("@sha256:" + "3" * 64)
    assert one(found, "ResourceQuota")["metadata"]["namespace"] == PODS


def test_alerts_name_measurements_that_exist() -> None:
    rules = (DEPLOY / "kustomize" / "monitoring" / "rules.yaml").read_text()
    told = set(re.findall(r"\b(?:sandbox|process)_\w+", rules))
    source = "".join(path.read_text() for path in BACKEND.glob("kube*.py"))
    assert len(told) > 3
    for name in told:
        own = name.removeprefix("sandbox_kubernetes_")
        assert name in metrics.HELP or (own != name and own in source), name


def test_the_images_are_named_by_content_and_run_as_nobody() -> None:
    for name in ("service", "agent"):
        recipe = (DEPLOY / f"Dockerfile.{name}").read_text()
        lines = [line for line in recipe.splitlines() if line and not line.startswith("#")]
        # No default: a tag is whatever its registry says today.
        assert "ARG BASE" in lines
        starts = [line for line in lines if line.startswith("FROM ")]
        assert len(starts) > 1
        assert all(line.split()[1] in ("${BASE}", "scratch") for line in starts)
        # A number, so that a kubelet can tell that it is not root; in the last stage.
        last = lines[max(i for i, line in enumerate(lines) if line.startswith("FROM ")) :]
        assert [line.split()[1].split(":")[0].isdecimal() for line in last if "USER" in line] == [
            True
        ]
        ignored = (DEPLOY / f"Dockerfile.{name}.dockerignore").read_text().split()
        assert ignored[0] == "*"
        for line in lines:
            if line.startswith("COPY ") and "--from" not in line:
                source = line.split()[1]
                assert (ROOT / source).exists()
                assert any(source.startswith(word.removeprefix("!")) for word in ignored[1:])
    lock = (DEPLOY / "requirements.lock").read_text()
    assert lock.count("==") <= lock.count("--hash=sha256:")
