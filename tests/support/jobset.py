"""What JobSet v1alpha2 takes, as a custom resource definition: its fields, types and choices, and nothing unknown.

The template of a Job, which Kubernetes itself defines, is left open here; kubernetes-validate checks it as a Job.
"""

from typing import Any

TEXT, NUMBER, SWITCH = {"type": "string"}, {"type": "integer", "format": "int32"}, {"type": "boolean"}
TEXTS = {"type": "array", "items": TEXT}
OPEN = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def chosen(*values: str) -> dict[str, Any]:
    return {**TEXT, "enum": list(values)}


def thing(*required: str, **properties: dict[str, Any]) -> dict[str, Any]:
    needed = {"required": list(required)} if required else {}
    return {"type": "object", "properties": properties, **needed}


def listed(items: dict[str, Any], key: str) -> dict[str, Any]:
    return {"type": "array", "items": items, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


ACTIONS = ("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts")
ACTIONS += ("RestartJob", "RestartJobAndIgnoreMaxRestarts")
RULE = thing(
    "name",
    "action",
    name=TEXT,
    action=chosen(*ACTIONS),
    onJobFailureReasons=TEXTS,
    onJobFailureMessagePatterns=TEXTS,
    targetReplicatedJobs=TEXTS,
)
REPLICATED_JOB = thing(
    "name",
    "template",
    name=TEXT,
    groupName=TEXT,
    replicas={**NUMBER, "default": 1},
    template=OPEN,
    dependsOn=listed(thing("name", "status", name=TEXT, status=chosen("Ready", "Complete")), "name"),
)
SPEC = thing(
    replicatedJobs=listed(REPLICATED_JOB, "name"),
    network=thing(enableDNSHostnames=SWITCH, subdomain=TEXT, publishNotReadyAddresses=SWITCH),
    successPolicy=thing("operator", operator=chosen("All", "Any"), targetReplicatedJobs=TEXTS),
    failurePolicy=thing(
        maxRestarts=NUMBER,
        restartStrategy=chosen("Recreate", "BlockingRecreate", "InPlaceRestart"),
        rules={"type": "array", "items": RULE},
    ),
    startupPolicy=thing("startupPolicyOrder", startupPolicyOrder=chosen("AnyOrder", "InOrder")),
    suspend=SWITCH,
    coordinator=thing("replicatedJob", replicatedJob=TEXT, jobIndex={"type": "integer"}, podIndex={"type": "integer"}),
    managedBy=TEXT,
    ttlSecondsAfterFinished={**NUMBER, "minimum": 0},
)
CONDITION = thing(
    "type",
    "status",
    "reason",
    "message",
    "lastTransitionTime",
    type=TEXT,
    status=chosen("True", "False", "Unknown"),
    reason={**TEXT, "minLength": 1},
    message=TEXT,
    observedGeneration={"type": "integer"},
    lastTransitionTime={**TEXT, "format": "date-time"},
)
COUNTS = dict.fromkeys(("ready", "succeeded", "failed", "active", "suspended"), NUMBER)
STATUS = thing(
    conditions=listed(CONDITION, "type"),
    restarts=NUMBER,
    restartsCountTowardsMax=NUMBER,
    terminalState=TEXT,
    replicatedJobsStatus=listed(thing("name", *COUNTS, name=TEXT, **COUNTS), "name"),
)
SCHEMA = thing(apiVersion=TEXT, kind=TEXT, metadata={"type": "object"}, spec=SPEC, status=STATUS)

DEFINITION = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {
        "name": "jobsets.jobset.x-k8s.io",
        # Names under k8s.io are kept for approved ones, and this is one.
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
