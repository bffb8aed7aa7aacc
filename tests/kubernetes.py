"""Schema of the Kubernetes objects in `cluster/kubernetes`: allowed fields and their types.

It follows the references of Kubernetes 1.31 (https://kubernetes.io/docs/reference/kubernetes-api)
and JobSet v1alpha2 (https://jobset.sigs.k8s.io/docs/reference), but contains only the fields in
use; add others as needed. A field `name!` is required. A list contains the type of its entries, a
tuple the allowed values; a compiled expression must match the whole text, and `Each` is a map with
arbitrary names.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple


class Each(NamedTuple):
    """A map whose names match an expression and whose values have one type."""

    name: re.Pattern[str]
    value: Any


QUANTITY: Final = re.compile(r"\d+(\.\d+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
PATH: Final = re.compile(r"/\S*")
_KEY: Final = re.compile(r"([a-z0-9.-]+/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_RESOURCE: Final = re.compile(r"cpu|memory|storage|ephemeral-storage|nvidia\.com/gpu|amd\.com/gpu")
_VARIABLE: Final = re.compile(r"[A-Z_][A-Z0-9_]*")
_FIELD_PATH: Final = re.compile(
    r"metadata\.(name|namespace|uid|(labels|annotations)\['[\w./-]+'\])|spec\.(nodeName|serviceAccountName)|"
    r"status\.(hostIP|podIP)"
)

_LABELS: Final = Each(_KEY, re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?"))
_NAMELESS: Final = {"labels": _LABELS, "annotations": Each(_KEY, str)}
_METADATA: Final = {"name!": LABEL, "namespace": LABEL, **_NAMELESS}
_QUANTITIES: Final = Each(_RESOURCE, QUANTITY)
_RESOURCES: Final = {"limits": _QUANTITIES, "requests": _QUANTITIES}
_OF_KEY: Final = {"name!": LABEL, "key!": str, "optional": bool}

_CONTAINER: Final = {
    "name!": LABEL,
    "image!": str,
    "imagePullPolicy": ("Always", "IfNotPresent", "Never"),
    "command": [str],
    "args": [str],
    "workingDir": PATH,
    "env": [
        {
            "name!": _VARIABLE,
            "value": str,
            "valueFrom": {
                "secretKeyRef": _OF_KEY,
                "configMapKeyRef": _OF_KEY,
                "fieldRef": {"fieldPath!": _FIELD_PATH},
            },
        }
    ],
    "resources": _RESOURCES,
    "securityContext": {
        "allowPrivilegeEscalation": bool,
        "readOnlyRootFilesystem": bool,
        "privileged": bool,
        "runAsNonRoot": bool,
        "runAsUser": int,
        "runAsGroup": int,
        "capabilities": {"add": [str], "drop": [str]},
    },
    "volumeMounts": [{"name!": LABEL, "mountPath!": PATH, "subPath": str, "readOnly": bool}],
}
_POD: Final = {
    "subdomain": LABEL,
    "restartPolicy": ("Always", "OnFailure", "Never"),
    "terminationGracePeriodSeconds": int,
    "nodeSelector": _LABELS,
    "serviceAccountName": LABEL,
    "priorityClassName": LABEL,
    "tolerations": [
        {
            "key": _KEY,
            "operator": ("Exists", "Equal"),
            "value": str,
            "effect": ("NoSchedule", "PreferNoSchedule", "NoExecute"),
            "tolerationSeconds": int,
        }
    ],
    "securityContext": {
        "runAsNonRoot": bool,
        "runAsUser": int,
        "runAsGroup": int,
        "fsGroup": int,
        "fsGroupChangePolicy": ("Always", "OnRootMismatch"),
        "seccompProfile": {"type!": ("RuntimeDefault", "Unconfined", "Localhost")},
    },
    "containers!": [_CONTAINER],
    "volumes": [
        {
            "name!": LABEL,
            "persistentVolumeClaim": {"claimName!": LABEL, "readOnly": bool},
            "emptyDir": {"medium": ("", "Memory"), "sizeLimit": QUANTITY},
            "configMap": {"name!": LABEL, "optional": bool},
        }
    ],
}
_POD_TEMPLATE: Final = {"metadata": _NAMELESS, "spec!": _POD}
_CONDITION: Final = {"type!": str, "status": ("True", "False", "Unknown")}
_JOB: Final = {
    "completionMode": ("NonIndexed", "Indexed"),
    "completions": int,
    "parallelism": int,
    "backoffLimit": int,
    "backoffLimitPerIndex": int,
    "maxFailedIndexes": int,
    "activeDeadlineSeconds": int,
    "ttlSecondsAfterFinished": int,
    "suspend": bool,
    "podReplacementPolicy": ("Failed", "TerminatingOrFailed"),
    "podFailurePolicy": {
        "rules!": [
            {
                "action!": ("FailJob", "FailIndex", "Ignore", "Count"),
                "onPodConditions": [_CONDITION],
                "onExitCodes": {
                    "containerName": LABEL,
                    "operator!": ("In", "NotIn"),
                    "values!": [int],
                },
            }
        ]
    },
    "successPolicy": {
        "rules!": [{"succeededCount": int, "succeededIndexes": re.compile(r"[\d,-]+")}]
    },
    "template!": _POD_TEMPLATE,
}

_BODIES: Final = {
    ("v1", "Service"): {
        "clusterIP": ("None",),
        "publishNotReadyAddresses": bool,
        "selector": _LABELS,
        "ports": [
            {"name": LABEL, "port!": int, "targetPort": int, "protocol": ("TCP", "UDP", "SCTP")}
        ],
    },
    ("v1", "PersistentVolumeClaim"): {
        "accessModes!": [("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod")],
        "storageClassName": LABEL,
        "volumeName": LABEL,
        "volumeMode": ("Filesystem", "Block"),
        "resources!": _RESOURCES,
    },
    ("v1", "Pod"): _POD,
    ("apps/v1", "Deployment"): {
        "replicas": int,
        "strategy": {"type!": ("Recreate", "RollingUpdate")},
        "selector!": {"matchLabels": _LABELS},
        "template!": _POD_TEMPLATE,
    },
    ("batch/v1", "Job"): _JOB,
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): {
        "network": {
            "enableDNSHostnames": bool,
            "subdomain": LABEL,
            "publishNotReadyAddresses": bool,
        },
        "successPolicy": {"operator!": ("All", "Any"), "targetReplicatedJobs": [LABEL]},
        "failurePolicy": {
            "maxRestarts": int,
            "restartStrategy": ("Recreate", "BlockingRecreate"),
            "rules": [
                {
                    "name": str,
                    "action!": ("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"),
                    "onJobFailureReasons": [
                        (
                            *("BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes"),
                            *("MaxFailedIndexesExceeded", "PodFailurePolicy"),
                        )
                    ],
                    "targetReplicatedJobs": [LABEL],
                }
            ],
        },
        "suspend": bool,
        "ttlSecondsAfterFinished": int,
        "replicatedJobs!": [
            {"name!": LABEL, "replicas": int, "template!": {"metadata": _NAMELESS, "spec!": _JOB}}
        ],
    },
}


def mistakes(thing: Mapping[str, Any]) -> list[str]:
    """Return descriptions of unknown fields, missing fields and wrong types in an object."""
    kind = thing.get("apiVersion"), thing.get("kind")
    body = next((body for known, body in _BODIES.items() if known == kind), None)
    if body is None:
        return [f"kind: expected one of {sorted(_BODIES)}, got {kind}"]
    form = {"apiVersion!": str, "kind!": str, "metadata!": _METADATA, "spec!": body}
    return list(_mistakes(thing, form, str(kind[1])))


def _mistakes(value: object, form: Any, path: str) -> Iterator[str]:
    if isinstance(form, Each):
        yield from _of_map(value, form, path)
    elif isinstance(form, Mapping):
        yield from _of_object(value, form, path)
    elif isinstance(form, list):
        if not isinstance(value, list) or not value:
            yield f"{path}: expected a list, got {value!r}"
            return
        for place, each in enumerate(value):
            yield from _mistakes(each, form[0], f"{path}[{place}]")
    elif not _fits(value, form):
        yield f"{path}: expected {form}, got {value!r}"


def _of_object(value: object, form: Mapping[str, Any], path: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{path}: expected fields, got {value!r}"
        return
    known = {name.rstrip("!"): each for name, each in form.items()}
    lacking = {name[:-1] for name in form if name.endswith("!")} - value.keys()
    yield from (f"{path}.{name}: expected it, got none" for name in sorted(lacking))
    for name, each in value.items():
        if name not in known:
            yield f"{path}.{name}: expected one of {sorted(known)}"
        else:
            yield from _mistakes(each, known[name], f"{path}.{name}")


def _of_map(value: object, form: Each, path: str) -> Iterator[str]:
    if not isinstance(value, dict) or not value:
        yield f"{path}: expected names and values, got {value!r}"
        return
    for name, each in value.items():
        if not isinstance(name, str) or form.name.fullmatch(name) is None:
            yield f"{path}: expected a name as {form.name.pattern}, got {name!r}"
        yield from _mistakes(each, form.value, f"{path}.{name}")


def _fits(value: object, form: Any) -> bool:
    """Return whether a scalar has a type; int, bool and str are not converted to each other."""
    if isinstance(form, tuple):
        return any(value == each and type(value) is type(each) for each in form)
    if form is QUANTITY and type(value) is int:
        return value >= 0
    if isinstance(form, re.Pattern):
        return isinstance(value, str) and form.fullmatch(value) is not None
    return type(value) is form and (form is not int or value >= 0)
