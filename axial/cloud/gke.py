"""Google Kubernetes Engine: a JobSet, whose controller lives in the cluster. JobSet 0.10 or later.

A host is a pod, and its supervisor the container's first process. A pod that fails makes its Job fail, by
`podFailurePolicy` with a reason and a message that tell which rule matched; the JobSet's own rules read them:

| end of a pod | Job fails | JobSet |
|---|---|---|
| 2, 70, 124: bad input, a fault, the deadline | rule 0 | ends |
| the node is taken away (DisruptionTarget) | rule 1 | is made again, which does not count |
| 42: preempted, a lost host | rule 2 | the same |
| other | BackoffLimitExceeded | is made again, at most `RESTARTS` times |
| activeDeadlineSeconds, as a backstop | DeadlineExceeded | ends |

The messages are no stable interface. They were read from kubernetes 95f0849, pkg/controller/job/pod_failure_policy.go
("Container %s for pod %s/%s failed with exit code %v matching %v rule at index %d", "Pod %s/%s has condition %v
matching %v rule at index %d"), and stand in JobSet 0.10.1's keps/262-ConfigurableFailurePolicy. The rest is from its
api/jobset/v1alpha2/jobset_types.go, from https://docs.cloud.google.com/kubernetes-engine/docs/how-to/tpus and, of
Kueue's labels, from https://kueue.sigs.k8s.io/docs/concepts/workload.
"""

import json
import time

from axial.cloud import runs
from axial.cloud.engine import MARGIN, Engine
from axial.errors import InputError

SITE = "https://jobset.sigs.k8s.io/docs/installation"
CONTAINER, JOB = "axial", "slice"  # of every pod, and the JobSet's only replicated Job
POLICY = "PodFailurePolicy"  # reason of a Job
INDEX = "batch.kubernetes.io/job-completion-index"
FIELD = "jobsets.spec.failurePolicy.rules.onJobFailureMessagePatterns"  # the newest that is used here: JobSet 0.10
RESTARTS = 3
KEPT = 7 * 24 * 3600  # seconds that a JobSet which has ended is there to be asked


class Gke(Engine):
    """See the module."""

    name, tool, file = "gke", "kubectl", "jobset.yaml"
    install = "gcloud components install kubectl gke-gcloud-auth-plugin"
    flags = ("reservation", "zone", "runtime", "service_account", "namespace", "context", "queue")
    needs_to_launch = ("runtime",)
    capacity = ("on_demand", "spot", "flex_start", "reserved")
    # Of kubectl 1.3x: staging/src/k8s.io/kubectl/pkg/cmd/util/helpers.go, pkg/explain, and of the API server.
    refusals = (
        (r'namespaces "[^"]*" not found', "--namespace={namespace}: the cluster has no such namespace"),
        (r"\(AlreadyExists\)", "--name={name}: is in use; axial-tpu delete --engine=gke --name={name} frees it"),
        (r'localqueues\S* "[^"]*" not found', "--queue={queue}: the namespace {namespace} has no such queue of Kueue"),
        (r'resource type "localqueues"', "--queue={queue}: the cluster has no Kueue: https://kueue.sigs.k8s.io"),
        (
            r'field "?onJobFailure\S* does not exist',
            f"the cluster's JobSet is too old, 0.10 or later is needed: {SITE}",
        ),
        (r'(resource type "jobsets"|resource for "?jobset|kind "JobSet")', f"the cluster has no JobSet: {SITE}"),
        (r'jobsets\S* "[^"]*" not found', "--name={name}: the namespace {namespace} has no such run"),
        (r'context "[^"]*" does not exist', "--context={context}: the kubeconfig has no such context"),
        (
            r"(?i)(localhost:8080|unauthorized|must be logged in|getting credentials|invalid configuration)",
            "no credentials for a cluster: gcloud container clusters get-credentials CLUSTER",
        ),
    )

    def __init__(self, request):
        super().__init__(request)
        if (request.provisioning == "reserved") != bool(request.reservation):
            raise InputError("--reservation goes with --provisioning=reserved, and that with --reservation")
        if request.slice and not request.slice.kind.gke:
            raise InputError(f"--slice={request.slice.name}: GKE has no {request.slice.generation}; v4 to v6e")

    def body(self, run):
        """The JobSet."""
        request = self.request
        labels = {"axial-run": request.name}
        left = round(max(run.deadline - time.time(), 0) + MARGIN)
        metadata = {"name": request.name, "namespace": request.namespace, "labels": dict(labels)}
        if request.queue:
            names = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/max-exec-time-seconds"
            metadata["labels"] |= dict(zip(names, (request.queue, str(left))))
        if run.hosts > 1:
            metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
        exits = {"containerName": CONTAINER, "operator": "In"}
        final = sorted(runs.FINAL)
        of_pods = [
            {"action": "FailJob", "onExitCodes": {**exits, "values": final}},
            {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": "FailJob", "onExitCodes": {**exits, "values": [runs.PREEMPTED]}},
        ]
        job = {"parallelism": run.hosts, "completions": run.hosts, "completionMode": "Indexed", "backoffLimit": 0}
        job |= {"activeDeadlineSeconds": left, "successPolicy": {"rules": [{"succeededIndexes": "0"}]}}
        job |= {"podFailurePolicy": {"rules": of_pods}}
        job |= {"template": {"metadata": {"labels": labels}, "spec": self._pod(run)}}

        def rule(name, action, reason, *patterns):
            found = {"onJobFailureMessagePatterns": list(patterns)} if patterns else {}
            return {"name": name, "action": action, "onJobFailureReasons": [reason], **found}

        codes = "|".join(map(str, final))
        lost = (
            "condition DisruptionTarget matching FailJob rule at index 1$",
            f"exit code {runs.PREEMPTED} matching FailJob rule at index 2$",
        )
        of_jobs = [
            rule("final", "FailJobSet", POLICY, f"exit code ({codes}) matching FailJob rule at index 0$"),
            rule("lost", "RestartJobSetAndIgnoreMaxRestarts", POLICY, *lost),
            rule("backstop", "FailJobSet", "DeadlineExceeded"),
        ]
        spec = {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [JOB]},
            "failurePolicy": {"maxRestarts": RESTARTS, "restartStrategy": "BlockingRecreate", "rules": of_jobs},
            "ttlSecondsAfterFinished": KEPT,
            "replicatedJobs": [{"name": JOB, "replicas": 1, "template": {"spec": job}}],
        }
        return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}

    def _pod(self, run):
        request = self.request
        kind, gke = request.slice.kind.gke, "cloud.google.com/gke-"
        selector = {f"{gke}tpu-accelerator": kind, f"{gke}tpu-topology": request.slice.topology}
        if request.provisioning in ("spot", "flex_start"):
            selector[gke + request.provisioning.replace("_", "-")] = "true"
        if request.reservation:
            selector["cloud.google.com/reservation-name"] = request.reservation
        chips = {"google.com/tpu": str(request.slice.chips // request.slice.hosts)}
        # Names that JobSet gives to pods: NAME-JOB-JOBINDEX-PODINDEX in the subdomain NAME.
        hosts = [f"{request.name}-{JOB}-0-{host}.{request.name}" for host in range(run.hosts)]
        index = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
        variables = {"AXIAL_HOSTS": ",".join(hosts), runs.VARIABLE: run.to_json()}
        container = {"name": CONTAINER, "image": request.runtime, "command": runs.SUPERVISOR.split()}
        container["env"] = [{"name": "AXIAL_HOST", "valueFrom": index}]
        container["env"] += [{"name": name, "value": value} for name, value in variables.items()]
        container["ports"] = [{"containerPort": port} for port in (run.port - 1, run.port, 8471, 8476)]
        container |= {"securityContext": {"privileged": True}, "resources": {"requests": dict(chips), "limits": chips}}
        pod = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 120, "nodeSelector": selector}
        pod |= {"serviceAccountName": request.service_account} if request.service_account else {}
        return {**pod, "containers": [container]}

    def _kubectl(self, *arguments):
        context = [f"--context={self.request.context}"] if self.request.context else []
        return ["kubectl", *context, f"--namespace={self.request.namespace}", *arguments]

    def checks(self):
        found = [(self._kubectl("explain", FIELD, "--api-version=jobset.x-k8s.io/v1alpha2"), None)]
        if self.request.queue:
            found.append((self._kubectl("get", "localqueues", self.request.queue), None))
        return found

    def launch(self, path, run):
        return self._kubectl("create", "--validate=strict", f"--filename={path}")

    def status(self):
        return self._kubectl("get", "jobsets", self.request.name, "--output=json")

    def describe(self, output):
        status = json.loads(output).get("status", {})
        true = {c["type"]: c.get("message", "") for c in status.get("conditions", []) if c.get("status") == "True"}
        restarts, counted = status.get("restarts", 0), status.get("restartsCountTowardsMax", 0)
        state = next((kind for kind in ("Completed", "Failed", "Suspended") if kind in true), "")
        ready = sum(job.get("ready", 0) for job in status.get("replicatedJobsStatus", []))
        said = f"{state.lower()}: {true[state]}" if state else ("runs" if ready else "waits for its hosts")
        return f"{said}; made again {restarts} times, {counted} of them of {RESTARTS}", state in ("", "Suspended")

    def logs(self):
        first = f"--selector=jobset.sigs.k8s.io/jobset-name={self.request.name},{INDEX}=0"
        return self._kubectl("logs", "--follow", "--tail=-1", first)

    def delete(self):
        return self._kubectl("delete", "jobsets", self.request.name)
