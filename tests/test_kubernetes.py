"""Check the manifests of deploy/kubernetes: API schemas, references between objects, and equality with Compose."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.support.processes import ROOT
from webapp.checks import FILE_VARIABLES, describe_unknown_variables
from webapp.environment import WebSettings
from workers.external_runs.command_line import parse_command

FOLDER = ROOT / "deploy" / "kubernetes"
KUBERNETES_VERSIONS = (
    pytest.param("1.30", marks=pytest.mark.extended),
    "1.37",
)  # the oldest of the how-to, and the newest
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
# Only variables of this file can form the addresses of the database and of Redis.
PASSWORDS = {"MESHBOARD_REDIS_PASSWORD", "MESHBOARD_DATABASE_PASSWORD"}
CREATED_BY_ADMIN = {"board-tls"}  # docs/howto/kubernetes.md
Object = dict[str, Any]

# The fields of the custom resources that the examples use, as in the published definitions (JobSet 0.12, Trainer 2.3).
JOB_SET = {
    "type": "object",
    "required": ["replicatedJobs"],
    "additionalProperties": False,
    "properties": {
        "failurePolicy": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"maxRestarts": {"type": "integer", "minimum": 0}},
        },
        "replicatedJobs": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "template"],
                "additionalProperties": False,
                "properties": {
                    "name": {"type": "string"},
                    "replicas": {"type": "integer", "minimum": 0},
                    "template": {"type": "object", "required": ["spec"]},
                },
            },
        },
    },
}
TRAIN_JOB = {
    "type": "object",
    "required": ["runtimeRef"],
    "additionalProperties": False,
    "properties": {
        "runtimeRef": {
            "type": "object",
            "required": ["name"],
            "additionalProperties": False,
            "properties": {name: {"type": "string", "maxLength": 253} for name in ("apiGroup", "kind", "name")},
        },
        "trainer": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "image": {"type": "string", "maxLength": 500},
                "command": {"type": "array", "maxItems": 128, "items": {"type": "string"}},
                "args": {"type": "array", "maxItems": 128, "items": {"type": "string"}},
                "env": {"type": "array", "maxItems": 128},
                "numNodes": {"type": "integer", "minimum": 0},
                "numProcPerNode": {"type": "integer", "minimum": 1},
                "resourcesPerNode": {"type": "object"},
            },
        },
    },
}
CUSTOM_RESOURCES = {"jobset.x-k8s.io/v1alpha2": JOB_SET, "trainer.kubeflow.org/v1alpha1": TRAIN_JOB}


def read_env_file(name: str) -> dict[str, str]:
    lines = [line for line in (FOLDER / name).read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def build_objects() -> list[Object]:
    """Return the objects that `kustomize build` prints, without the hashes in generated names."""
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    found = [each for name in kustomization["resources"] for each in yaml.safe_load_all((FOLDER / name).read_text())]
    for kind, generators in (("ConfigMap", "configMapGenerator"), ("Secret", "secretGenerator")):
        for generator in kustomization[generators]:
            [file] = generator["envs"]
            # Users copy the example to secrets.env.
            data = read_env_file(f"{file}.example" if kind == "Secret" else file)
            key = "stringData" if kind == "Secret" else "data"
            found.append({"apiVersion": "v1", "kind": kind, "metadata": {"name": generator["name"]}, key: data})
    for each in found:
        if each["kind"] != "Namespace":
            each["metadata"]["namespace"] = kustomization["namespace"]
    return found


def get_pod(workload: Object) -> Object:
    pod: Object = workload["spec"]["template"]
    return pod


def list_workloads(objects: list[Object]) -> list[Object]:
    return [each for each in objects if each["kind"] in ("Deployment", "StatefulSet", "Job")]


def get_container(objects: list[Object], name: str) -> Object:
    [found] = [w for w in list_workloads(objects) if w["metadata"]["name"] == name]
    [container] = get_pod(found)["spec"]["containers"]
    return dict(container)


def get_environment(objects: list[Object], container: Object) -> dict[str, str]:
    """Return the variables of a container. The value of a variable from a secret or a field is empty."""
    maps = {each["metadata"]["name"]: each["data"] for each in objects if each["kind"] == "ConfigMap"}
    found: dict[str, str] = {}
    for source in container.get("envFrom", []):
        found |= maps[source["configMapRef"]["name"]]
    return found | {entry["name"]: entry.get("value", "") for entry in container.get("env", [])}


def matches(selector: Object, labels: dict[str, str]) -> bool:
    exact = selector.get("matchLabels", {}).items() <= labels.items()
    return exact and all(labels.get(rule["key"]) in rule["values"] for rule in selector.get("matchExpressions", []))


def find_broken_references(objects: list[Object]) -> list[str]:
    """Return a sentence for each name, label, or port that no object has."""
    return sorted([*_check_workloads(objects), *_check_services(objects), *_check_policies(objects)])


def _names(objects: list[Object], kind: str) -> dict[str, Object]:
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == kind}


def _check_workloads(objects: list[Object]) -> Iterator[str]:
    for workload in list_workloads(objects):
        name, spec, pod = workload["metadata"]["name"], workload["spec"], get_pod(workload)
        if "selector" in spec and not matches(spec["selector"], pod["metadata"]["labels"]):
            yield f"{name}: the selector does not match the labels of its pods"
        if workload["kind"] == "StatefulSet" and spec["serviceName"] not in _names(objects, "Service"):
            yield f"{name}: no service {spec['serviceName']}"
        volumes = {volume["name"] for volume in pod["spec"].get("volumes", [])}
        volumes |= {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", [])}
        for volume in pod["spec"].get("volumes", []):
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            if claim and claim not in _names(objects, "PersistentVolumeClaim"):
                yield f"{name}: no claim {claim}"
            if secret := volume.get("secret"):
                keys = _names(objects, "Secret").get(secret["secretName"], {}).get("stringData", {})
                missing = [item["key"] for item in secret["items"] if item["key"] not in keys]
                yield from (f"{name}: no secret {secret['secretName']}/{key}" for key in missing)
        for container in pod["spec"]["containers"]:
            yield from (
                f"{name}: no volume {mount['name']}"
                for mount in container.get("volumeMounts", [])
                if mount["name"] not in volumes
            )
            yield from (f"{name}: {problem}" for problem in _check_environment(objects, container))


def _check_environment(objects: list[Object], container: Object) -> Iterator[str]:
    secrets, services = _names(objects, "Secret"), _names(objects, "Service")
    for source in container.get("envFrom", []):
        if source["configMapRef"]["name"] not in _names(objects, "ConfigMap"):
            yield f"no settings {source['configMapRef']['name']}"
            return
    known: set[str] = set()
    for entry in container.get("env", []):
        reference = entry.get("valueFrom", {}).get("secretKeyRef")
        if reference and reference["key"] not in secrets.get(reference["name"], {}).get("stringData", {}):
            yield f"no secret {reference['name']}/{reference['key']}"
        # Kubernetes replaces only variables that `env` sets above, and none of `envFrom`.
        for used in set(re.findall(r"\$\((\w+)\)", entry.get("value", ""))) - known:
            yield f"{entry['name']} uses {used} too early"
        known.add(entry["name"])
    words = " ".join([*container.get("command", []), *container.get("args", [])])
    yield from (f"the command uses the unknown {used}" for used in set(re.findall(r"\$\((\w+)\)", words)) - known)
    for value in get_environment(objects, container).values():
        for host, port in re.findall(r"^\w+://(?:[^@/]*@)?(\w+):(\d+)", value):
            if int(port) not in [p["port"] for p in services.get(host, {"spec": {"ports": []}})["spec"]["ports"]]:
                yield f"no service {host}:{port}"


def _list_ports(pod: Object) -> list[Object]:
    return [port for container in pod["spec"]["containers"] for port in container.get("ports", [])]


def _check_services(objects: list[Object]) -> Iterator[str]:
    services = _names(objects, "Service")
    for name, service in services.items():
        selector = {"matchLabels": service["spec"]["selector"]}
        pods = [get_pod(w) for w in list_workloads(objects) if matches(selector, get_pod(w)["metadata"]["labels"])]
        if len(pods) != 1:
            yield f"service {name}: selects the pods of {len(pods)} workloads"
            continue
        ports = {key for port in _list_ports(pods[0]) for key in (port["containerPort"], port["name"])}
        for port in service["spec"].get("ports", []):
            if port.get("targetPort", port["port"]) not in ports:
                yield f"service {name}: no port {port.get('targetPort', port['port'])}"
    for ingress in _names(objects, "Ingress").values():
        for rule in ingress["spec"]["rules"]:
            for path in rule["http"]["paths"]:
                target = path["backend"]["service"]
                service = services.get(target["name"], {"spec": {"ports": []}})
                if target["port"]["name"] not in [port["name"] for port in service["spec"]["ports"]]:
                    yield f"ingress: no service {target['name']}:{target['port']['name']}"
        for tls in ingress["spec"]["tls"]:
            if tls["secretName"] not in CREATED_BY_ADMIN or tls["hosts"] != [
                r["host"] for r in ingress["spec"]["rules"]
            ]:
                yield "ingress: TLS for another host or secret"


def _check_policies(objects: list[Object]) -> Iterator[str]:
    pods = [get_pod(workload) for workload in list_workloads(objects)]
    for name, policy in _names(objects, "NetworkPolicy").items():
        chosen = [pod for pod in pods if matches(policy["spec"]["podSelector"], pod["metadata"]["labels"])]
        rules = policy["spec"].get("ingress", [])
        peers = [
            peer for rule in [*rules, *policy["spec"].get("egress", [])] for peer in rule.get("from", rule.get("to"))
        ]
        selectors = [policy["spec"]["podSelector"], *(peer["podSelector"] for peer in peers if "podSelector" in peer)]
        for selector in selectors:
            if not any(matches(selector, pod["metadata"]["labels"]) for pod in pods):
                yield f"policy {name}: no pod matches {selector}"
            for rule in selector.get("matchExpressions", []):
                values = {pod["metadata"]["labels"].get(rule["key"]) for pod in pods}
                yield from (f"policy {name}: no pod is a {value}" for value in rule["values"] if value not in values)
        served = {port["containerPort"] for pod in chosen for port in _list_ports(pod)}
        for port in (port["port"] for rule in rules for port in rule.get("ports", [])):
            if port not in served:
                yield f"policy {name}: no pod listens on {port}"


@pytest.fixture
def objects() -> list[Object]:
    return build_objects()


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_objects_are_valid(objects: list[Object], version: str) -> None:
    for each in objects:
        assert kubernetes_validate.validate(each, version, strict=True) == version


def test_kustomization_lists_every_file() -> None:
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    files = {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(kustomization["resources"]) == files
    version = (ROOT / "VERSION").read_text().strip()
    assert {image["name"]: image["newTag"] for image in kustomization["images"]} == {
        "meshboard-web": version,
        "meshboard-worker": version,
    }


def test_references_resolve(objects: list[Object]) -> None:
    assert find_broken_references(objects) == []


def _find(objects: list[Object], kind: str, name: str) -> Object:
    return _names(objects, kind)[name]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda o: o.remove(_find(o, "PersistentVolumeClaim", "state")), "controller: no claim state"),
        (lambda o: o.remove(_find(o, "ConfigMap", "host-settings")), "host-gpu: no settings host-settings"),
        (
            lambda o: _find(o, "Secret", "board-secrets")["stringData"].pop("MESHBOARD_JOIN_TOKEN"),
            "host-gpu: no secret",
        ),
        (lambda o: o.remove(_find(o, "Service", "redis")), "web: no service redis:6379"),
        (lambda o: o.remove(_find(o, "Service", "host-gpu")), "host-gpu: no service host-gpu"),
        (lambda o: get_pod(_find(o, "Deployment", "web"))["metadata"]["labels"].clear(), "web: the selector does not"),
        (lambda o: _find(o, "Service", "web")["spec"]["selector"].update(a="b"), "service web: selects the pods of 0"),
        (lambda o: _find(o, "Service", "web")["spec"]["ports"][0].update(targetPort="x"), "service web: no port x"),
        (lambda o: _find(o, "Service", "web")["spec"]["ports"][0].update(name="x"), "ingress: no service web:http"),
        (lambda o: o.remove(_find(o, "Deployment", "recorder")), "policy redis: no pod is a recorder"),
        (
            lambda o: get_pod(_find(o, "Job", "migrate"))["spec"]["containers"][0]["env"].reverse(),
            "migrate: MESHBOARD_REDIS_URL uses MESHBOARD_REDIS_PASSWORD too early",
        ),
    ],
)
def test_finds_broken_references(objects: list[Object], damage: Callable[[list[Object]], None], message: str) -> None:
    damage(objects)
    assert [problem for problem in find_broken_references(objects) if problem.startswith(message)] != []


@pytest.mark.parametrize("name", ["web", "controller", "recorder", "migrate", "join-token", "host-gpu"])
def test_processes_and_settings_equal_those_of_compose(objects: list[Object], name: str) -> None:
    container, service = get_container(objects, name), COMPOSE[name]
    # On Kubernetes, a secret volume and not the job join-token writes the file with the join token.
    command = re.sub(r"\s+--file \S+", "", service["command"]).replace("compose", "kubernetes")
    assert " ".join(container["command"]) == command
    names = set(get_environment(objects, container))
    set_there = {variable for variable, value in service["environment"].items() if value is not None}
    assert sorted(set_there - names) == []
    assert sorted(names - set(service["environment"]) - PASSWORDS) == []
    assert describe_unknown_variables(names) == []
    target = service["build"]["target"]
    assert container["image"] == f"meshboard-{target}"


def find_missing_variables(text: str) -> list[str]:
    """Return the MESHBOARD_ variables in a text that no setting and no code has."""
    packages = ("client", "jobs", "planner", "webapp", "workers")
    code = "".join(path.read_text() for name in packages for path in (ROOT / name).rglob("*.py") if name != "webapp")
    read = {*re.findall(r"MESHBOARD_\w+", code), *PASSWORDS}
    read |= {f"MESHBOARD_{name.upper()}" for name in (*WebSettings.model_fields, *FILE_VARIABLES)}
    return sorted(set(re.findall(r"MESHBOARD_[A-Z_]+", text)) - read)


def test_variables_of_manifests_and_how_to_exist() -> None:
    files = [path for path in FOLDER.rglob("*") if path.is_file() and path.name != "secrets.env"]
    texts = [path.read_text() for path in [*files, ROOT / "docs" / "howto" / "kubernetes.md"]]
    assert len(set(re.findall(r"MESHBOARD_[A-Z_]+", "".join(texts)))) > 20
    assert find_missing_variables("".join(texts)) == []
    assert find_missing_variables("MESHBOARD_SLOT=8 MESHBOARD_SLOTS=8") == ["MESHBOARD_SLOT"]


def test_services_equal_those_of_compose(objects: list[Object]) -> None:
    for name in ("redis", "postgres"):
        assert get_container(objects, name)["image"] == COMPOSE[name]["image"]
    command = re.sub(r"\$\{(\w+):\?\}", r"$(\1)", re.sub(r"\$\{\w+:-(\w+)\}", r"\1", COMPOSE["redis"]["command"]))
    assert get_container(objects, "redis")["args"] == shlex.split(command)
    assert set(COMPOSE["postgres"]["environment"]) <= set(get_environment(objects, get_container(objects, "postgres")))


@pytest.mark.parametrize("name", ["controller", "recorder", "host-gpu", "redis", "postgres"])
def test_probes_equal_the_health_checks_of_compose(objects: list[Object], name: str) -> None:
    container = get_container(objects, name)
    probe = container.get("livenessProbe") or container["readinessProbe"]
    kind, *words = COMPOSE[name]["healthcheck"]["test"]
    expected = ["sh", "-c", words[0].replace("$$", "$")] if kind == "CMD-SHELL" else words
    assert probe["exec"]["command"] == expected


def test_web_probes_use_the_health_check_of_compose(objects: list[Object]) -> None:
    container = get_container(objects, "web")
    for name in ("readinessProbe", "livenessProbe", "startupProbe"):
        path = container[name]["httpGet"]["path"]
        assert f"8000{path}'" in COMPOSE["web"]["healthcheck"]["test"][-1]


def test_pods_run_without_privileges(objects: list[Object]) -> None:
    for workload in list_workloads(objects):
        pod, name = get_pod(workload)["spec"], workload["metadata"]["name"]
        assert (pod["automountServiceAccountToken"], pod["enableServiceLinks"]) == (False, False), name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False, name
            capabilities = {"drop": ["ALL"]} | ({"add": COMPOSE[name]["cap_add"]} if name == "host-gpu" else {})
            assert container["securityContext"]["capabilities"] == capabilities, name
            assert "memory" in container["resources"]["limits"], name


def test_hosts_have_a_slot_per_gpu_and_no_secrets_of_the_board(objects: list[Object]) -> None:
    container = get_container(objects, "host-gpu")
    environment = get_environment(objects, container)
    assert int(environment["MESHBOARD_SLOTS"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert environment["MESHBOARD_DEVICE"] == "cuda"
    assert [entry for entry in container["env"] if "secretKeyRef" in entry.get("valueFrom", {})] == []
    [workload] = [w for w in list_workloads(objects) if w["metadata"]["name"] == "host-gpu"]
    [secret] = [v["secret"] for v in get_pod(workload)["spec"]["volumes"] if "secret" in v]
    [mount] = [m["mountPath"] for m in container["volumeMounts"] if m["name"] == "join"]
    assert [(item["key"], f"{mount}/{item['path']}") for item in secret["items"]] == [
        ("MESHBOARD_JOIN_TOKEN", environment["MESHBOARD_JOIN_TOKEN_FILE"])
    ]
    assert secret["defaultMode"] == 0o400, "jobs run as other users"


def test_example_of_secrets_has_names_without_values(objects: list[Object]) -> None:
    example = read_env_file("secrets.env.example")
    assert set(example.values()) == {""}
    required = set(re.findall(r"\$\{(\w+):\?", (ROOT / "docker-compose.yml").read_text()))
    assert set(example) == required
    ignored = "deploy/kubernetes/secrets.env"
    assert subprocess.run(["git", "check-ignore", "-q", ignored], cwd=ROOT, check=False).returncode == 0
    assert ignored in (ROOT / ".dockerignore").read_text().split()


def read_example(name: str) -> tuple[Object, list[str], dict[str, str]]:
    """Return an example, the command of its container, and its variables as on the second node."""
    [found] = yaml.safe_load_all((FOLDER / "examples" / f"{name}.yaml").read_text())
    jsonschema.validate(found["spec"], CUSTOM_RESOURCES[found["apiVersion"]])
    if found["kind"] == "TrainJob":
        container = found["spec"]["trainer"]
        # Kubeflow's torch runtime sets these.
        nodes, ranks = container["numNodes"], container["numProcPerNode"]
        environment = {"PET_NNODES": str(nodes), "PET_NPROC_PER_NODE": str(ranks), "PET_NODE_RANK": "1"}
    else:
        [job] = found["spec"]["replicatedJobs"]
        [container] = job["template"]["spec"]["template"]["spec"]["containers"]
        environment = {}
    for entry in container["env"]:
        environment[entry["name"]] = entry.get("value", "1")
    return found, [*container["command"], *container["args"]], environment


@pytest.mark.parametrize("name", ["jobset", "trainjob"])
def test_examples_report_two_nodes_with_eight_ranks(name: str) -> None:
    found, command, environment = read_example(name)
    assert set(re.findall(r"\$\((\w+)\)", " ".join(command))) <= set(environment)
    assert command[0] == "meshboard-meter"
    launch = parse_command(command[command.index("--") + 1 :], environment, "logs", lambda: 0)
    assert (launch.nodes, launch.ranks, launch.node) == (2, 8, 1)
    assert "MESHBOARD_URL" in environment
    assert "MESHBOARD_TOKEN" in environment or "--token-file" in command
    assert found["metadata"]["name"] in command


def test_job_set_has_a_valid_job_and_a_pod_per_node() -> None:
    found, _, environment = read_example("jobset")
    [job] = found["spec"]["replicatedJobs"]
    kubernetes_validate.validate({"apiVersion": "batch/v1", "kind": "Job", **job["template"]}, "1.37", strict=True)
    spec = job["template"]["spec"]
    assert spec["parallelism"] == spec["completions"] == int(environment["PET_NNODES"])
    # JobSet names pods after the set, the replicated job, its replica, and the index, in a subdomain of the set.
    name = found["metadata"]["name"]
    assert environment["PET_MASTER_ADDR"] == f"{name}-{job['name']}-0-0.{name}"
