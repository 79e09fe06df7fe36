"""The manifests of `deploy/kubernetes`: what refers to something finds it, and what they ask of Penstock is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
import yaml
from deployed import command_fault, role_files, settings_fault
from pages import ROOT
from serving import Served

from penstock.config.settings import Settings

FOLDER = ROOT / "deploy" / "kubernetes"
KUSTOMIZATION: dict[str, Any] = yaml.safe_load((FOLDER / "kustomization.yaml").read_text("utf-8"))
WRITTEN = {"keys", "secret-key.env"}  # by the README's commands, as `users/` is
KINDS = {
    "Deployment": "apps/v1",
    "Job": "batch/v1",
    "Namespace": "v1",
    "PersistentVolumeClaim": "v1",
    "PodDisruptionBudget": "policy/v1",
    "ScaledObject": "keda.sh/v1alpha1",
    "Service": "v1",
}
Json = dict[str, Any]


def manifests() -> list[Json]:
    files = [yaml.safe_load_all((FOLDER / name).read_text("utf-8")) for name in KUSTOMIZATION["resources"]]
    return [manifest for file in files for manifest in file]


ALL = manifests()
DEPLOYMENTS = [each for each in ALL if each["kind"] == "Deployment"]
PODS = {each["metadata"]["name"]: each["spec"]["template"] for each in ALL if each["kind"] in ("Deployment", "Job")}


def of_kind(kind: str) -> list[Json]:
    return [each for each in ALL if each["kind"] == kind]


def container(pod: Json) -> Json:
    (found,) = pod["spec"]["containers"]
    return dict(found)


def settings_of(pod: Json) -> dict[str, str]:
    """The variables of a pod, without those of its secrets."""
    maps = {each["name"]: each["literals"] for each in KUSTOMIZATION["configMapGenerator"]}
    found: dict[str, str] = {}
    for source in container(pod)["envFrom"]:
        if "configMapRef" in source:
            found |= dict(line.split("=", 1) for line in maps[source["configMapRef"]["name"]])
    return found | {each["name"]: each["value"] for each in container(pod)["env"]}


def secrets() -> dict[str, list[str]]:
    """The keys of each secret."""
    found = {}
    for each in KUSTOMIZATION["secretGenerator"]:
        files = [line.split("=")[-1] for line in (*each.get("files", ()), *each.get("envs", ()))]
        assert all(file in WRITTEN or file.removeprefix("users/") in role_files() | {"penstock.conf"} for file in files)
        found[each["name"]] = [line.split("=")[0].rpartition("/")[2] for line in each.get("files", ())]
    return found


def test_every_object_has_its_kind_and_a_name_of_its_own() -> None:
    assert {each["kind"]: each["apiVersion"] for each in ALL} == KINDS
    names = [(each["kind"], each["metadata"]["name"]) for each in ALL]
    assert len(names) == len(set(names)) and len(DEPLOYMENTS) == 7


def test_all_files_are_listed() -> None:
    listed = {*KUSTOMIZATION["resources"], "kustomization.yaml", "nats-values.yaml"}
    assert {path.name for path in FOLDER.glob("*.yaml")} == listed


@pytest.mark.parametrize("name", PODS)
def test_a_pod_runs_a_command_of_ours_with_settings_that_it_has(name: str) -> None:
    assert command_fault(container(PODS[name])["args"]) == ""
    assert settings_fault(settings_of(PODS[name])) == ""


@pytest.mark.parametrize("name", PODS)
def test_a_pod_has_the_user_of_its_role_and_no_more(name: str) -> None:
    spec, files = PODS[name]["spec"], {each["name"]: each.get("files") for each in KUSTOMIZATION["secretGenerator"]}
    mounted = [volume["secret"]["secretName"] for volume in spec["volumes"] if "secret" in volume]
    (user,) = (secret for secret in mounted if secret.startswith("penstock-user-"))
    inbox = settings_of(PODS[name])["PENSTOCK_NATS_INBOX_PREFIX"]
    assert files[user] == [f"nkey=users/{inbox.removeprefix('_in_')}.nk"]
    assert spec["securityContext"]["runAsNonRoot"] and spec["automountServiceAccountToken"] is False
    own = container(PODS[name])["securityContext"]
    assert own["readOnlyRootFilesystem"] and own["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("name", PODS)
def test_what_a_pod_mounts_and_reads_is_there(name: str) -> None:
    spec, one = PODS[name]["spec"], container(PODS[name])
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    paths = {mount["mountPath"]: volumes.pop(mount["name"]) for mount in one["volumeMounts"]}
    assert volumes == {} and "/tmp" in paths and "/var/cache/penstock" in paths
    claims = {each["metadata"]["name"] for each in of_kind("PersistentVolumeClaim")}
    for volume in paths.values():
        assert volume.get("persistentVolumeClaim", {}).get("claimName") in claims | {None}
        assert volume.get("secret", {}).get("secretName") in secrets().keys() | {None}
    for value in settings_of(PODS[name]).values():
        if value.startswith("/run/"):
            folder, _, key = value.rpartition("/")
            assert key in secrets()[paths[folder]["secret"]["secretName"]]
    for source in one["envFrom"]:
        assert source.get("secretRef", {}).get("name") in secrets().keys() | {None}


def test_selectors_find_their_pods() -> None:
    for deployment in DEPLOYMENTS:
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert deployment["spec"]["selector"]["matchLabels"] == labels == deployment["metadata"]["labels"]
        (spread,) = deployment["spec"]["template"]["spec"]["topologySpreadConstraints"]
        assert spread["labelSelector"]["matchLabels"] == labels
    labelled = {each["metadata"]["name"]: each["metadata"]["labels"] for each in DEPLOYMENTS}
    budgets = {
        each["metadata"]["name"]: each["spec"]["selector"]["matchLabels"] for each in of_kind("PodDisruptionBudget")
    }
    assert budgets == labelled
    (service,) = of_kind("Service")
    assert service["spec"]["selector"] == labelled["penstock-bridge"]
    (scaled,) = of_kind("ScaledObject")
    assert scaled["spec"]["scaleTargetRef"]["name"] in labelled
    assert "replicas" not in next(each for each in DEPLOYMENTS if each["metadata"]["name"] == "penstock-worker")["spec"]


def test_there_is_time_to_drain() -> None:
    for deployment in DEPLOYMENTS:
        spec = deployment["spec"]["template"]["spec"]
        before = container(PODS[deployment["metadata"]["name"]]).get("lifecycle", {}).get("preStop", {})
        assert spec["terminationGracePeriodSeconds"] > 30 + before.get("sleep", {}).get("seconds", 0)


def probes() -> Iterator[tuple[str, str, Any]]:
    for deployment in DEPLOYMENTS:
        one = container(deployment["spec"]["template"])
        for name in ("startupProbe", "livenessProbe", "readinessProbe"):
            if name in one:
                yield one["name"], one[name]["httpGet"]["path"], one[name]["httpGet"]["port"]


def test_probes_and_services_name_ports_at_which_their_paths_are_answered(echo_server: Served) -> None:
    for deployment in DEPLOYMENTS:
        one, template = container(deployment["spec"]["template"]), deployment["spec"]["template"]
        ports = {port["name"]: port["containerPort"] for port in one["ports"]}
        assert str(ports["metrics"]) == settings_of(template)["PENSTOCK_METRICS_PORT"]
        assert template["metadata"]["annotations"]["prometheus.io/port"] == str(ports["metrics"])
        assert ports.get("http") in (None, Settings().port)
    asked = {(part == "bridge", path, port) for part, path, port in probes()}
    assert {(path, port) for is_bridge, path, port in asked if not is_bridge} == {("/metrics", "metrics")}
    paths = {path for is_bridge, path, port in asked if is_bridge and port == "http"}
    assert paths == {"/health/live", "/health/ready"}
    for path in paths:
        assert httpx2.get(f"{echo_server.url}{path}").status_code == 200


def test_scaling_asks_for_metrics_that_there_are() -> None:
    (scaled,) = of_kind("ScaledObject")
    (trigger,) = scaled["spec"]["triggers"]
    documented = dict(
        re.findall(r"^\| `([^`]+)` \| gauge \| ([^|]*) \|", (ROOT / "docs" / "reference.md").read_text("utf-8"), re.M)
    )
    asked = re.findall(r"(\w+)\{([^}]*)\}", trigger["metadata"]["query"])
    assert [name for name, _ in asked] == [
        "penstock_queue_depth",
        "penstock_requests_returned",
        "penstock_requests_active",
        "penstock_model_state",
    ]
    for name, matchers in asked:
        assert set(re.findall(r"(\w+)=", matchers)) <= set(re.findall("`([^`]+)`", documented[name])), name
    model = settings_of(PODS["penstock-worker"])["PENSTOCK_MODEL"]
    assert scaled["spec"]["minReplicaCount"] == 0 and settings_of(PODS["penstock-setup"])["PENSTOCK_MODEL"] == model
    assert all(f'model_name="{model}"' in matchers for _, matchers in asked)
    startup = container(PODS["penstock-worker"])["startupProbe"]
    behavior = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    longest = startup["periodSeconds"] * startup["failureThreshold"]
    assert behavior["scaleDown"]["stabilizationWindowSeconds"] >= longest <= scaled["spec"]["cooldownPeriod"]


def test_the_charts_values_include_the_users() -> None:
    values = yaml.safe_load((FOLDER / "nats-values.yaml").read_text("utf-8"))
    (mount,) = (patch["value"] for patch in values["container"]["patch"])
    (volume,) = (patch["value"] for patch in values["podTemplate"]["patch"])
    assert mount["name"] == volume["name"] and "penstock.conf" in secrets()[volume["secret"]["secretName"]]
    assert values["config"]["merge"]["$include"] == f"..{mount['mountPath'].removeprefix('/etc')}/penstock.conf"
    (url,) = (line for line in KUSTOMIZATION["configMapGenerator"][0]["literals"] if "NATS_URL" in line)
    assert url == "PENSTOCK_NATS_URL=nats://nats:4222"  # the chart's Service has the name of the release
