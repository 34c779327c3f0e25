"""Custom resource definition of JobSet v1alpha2: its fields, types and enums, with unknown fields dropped.

The Job template, which Kubernetes itself defines, is not checked here; kubernetes-validate checks it as a Job.
"""

from typing import Any

TEXT, NUMBER, SWITCH = {"type": "string"}, {"type": "integer", "format": "int32"}, {"type": "boolean"}
TEXTS = {"type": "array", "items": TEXT}
OPEN = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def enum(*values: str) -> dict[str, Any]:
    return {**TEXT, "enum": list(values)}


def object_type(*required: str, **properties: dict[str, Any]) -> dict[str, Any]:
    required_fields = {"required": list(required)} if required else {}
    return {"type": "object", "properties": properties, **required_fields}


def list_map(items: dict[str, Any], key: str) -> dict[str, Any]:
    return {"type": "array", "items": items, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


ACTIONS = ("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts")
ACTIONS += ("RestartJob", "RestartJobAndIgnoreMaxRestarts")
RULE = object_type(
    "name",
    "action",
    name=TEXT,
    action=enum(*ACTIONS),
    onJobFailureReasons=TEXTS,
    onJobFailureMessagePatterns=TEXTS,
    targetReplicatedJobs=TEXTS,
)
REPLICATED_JOB = object_type(
    "name",
    "template",
    name=TEXT,
    groupName=TEXT,
    replicas={**NUMBER, "default": 1},
    template=OPEN,
    dependsOn=list_map(object_type("name", "status", name=TEXT, status=enum("Ready", "Complete")), "name"),
)
SPEC = object_type(
    replicatedJobs=list_map(REPLICATED_JOB, "name"),
    network=object_type(enableDNSHostnames=SWITCH, subdomain=TEXT, publishNotReadyAddresses=SWITCH),
    successPolicy=object_type("operator", operator=enum("All", "Any"), targetReplicatedJobs=TEXTS),
    failurePolicy=object_type(
        maxRestarts=NUMBER,
        restartStrategy=enum("Recreate", "BlockingRecreate", "InPlaceRestart"),
        rules={"type": "array", "items": RULE},
    ),
    startupPolicy=object_type("startupPolicyOrder", startupPolicyOrder=enum("AnyOrder", "InOrder")),
    suspend=SWITCH,
    coordinator=object_type(
        "replicatedJob", replicatedJob=TEXT, jobIndex={"type": "integer"}, podIndex={"type": "integer"}
    ),
    managedBy=TEXT,
    ttlSecondsAfterFinished={**NUMBER, "minimum": 0},
)
CONDITION = object_type(
    "type",
    "status",
    "reason",
    "message",
    "lastTransitionTime",
    type=TEXT,
    status=enum("True", "False", "Unknown"),
    reason={**TEXT, "minLength": 1},
    message=TEXT,
    observedGeneration={"type": "integer"},
    lastTransitionTime={**TEXT, "format": "date-time"},
)
COUNTS = dict.fromkeys(("ready", "succeeded", "failed", "active", "suspended"), NUMBER)
STATUS = object_type(
    conditions=list_map(CONDITION, "type"),
    restarts=NUMBER,
    restartsCountTowardsMax=NUMBER,
    terminalState=TEXT,
    replicatedJobsStatus=list_map(object_type("name", *COUNTS, name=TEXT, **COUNTS), "name"),
)
SCHEMA = object_type(apiVersion=TEXT, kind=TEXT, metadata={"type": "object"}, spec=SPEC, status=STATUS)

DEFINITION = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {
        "name": "jobsets.jobset.x-k8s.io",
        # Groups under k8s.io need an approval annotation.
        "annotations": {"api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/jobset"},
    },
    "spec": {
        "group": "jobset.x-k8s.io",
        "names": {"kind": "JobSet", "listKind": "JobSetList", "plural": "jobsets", "singular": "jobset"},
        "scope": "Namespaced",
        "versions": [
            {
                "name": "v1alpha2",
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "schema": {"openAPIV3Schema": SCHEMA},
            }
        ],
    },
}
