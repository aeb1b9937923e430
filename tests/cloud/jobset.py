"""JobSet's rules, read from the YAML that axial writes, over processes of this machine in place of pods.

From kubernetes' pkg/controller/job/pod_failure_policy.go and job_controller.go (95f0849), and JobSet's
pkg/controllers/failure_policy.go (v0.10.1): a Job whose pod fails has a reason and a message by the first rule of its
`podFailurePolicy` that matches, or by its `backoffLimit`; the first rule of the JobSet that matches both acts.
"""

import re
import signal
import time

import yaml

from tests.cloud import slice_fixture

INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
GRACE = 3.0  # seconds; 15 on a spot node of GKE


class JobSet:
    """A JobSet in work.

    Attributes:
        restarts, counted: how often it was made again, and how often that counted.
        pods: the processes of its pods.
        state: 'Completed', 'Failed', or '' while it runs; `message` says why.
    """

    def __init__(self, here, text):
        """
        Args:
            here: a `Here`, whose hosts are the pods.
            text: the YAML.
        """
        self._here, body = here, yaml.safe_load(text)
        self._policy = body["spec"]["failurePolicy"]
        (replicated,) = body["spec"]["replicatedJobs"]
        self._job = replicated["template"]["spec"]
        (self._container,) = self._job["template"]["spec"]["containers"]
        self.restarts = self.counted = 0
        self.pods, self._disrupted = [], set()
        self.state = self.message = ""

    def run(self, disturb=lambda jobset: None, seconds=120):
        """Runs it to its end, and calls disturb(self) meanwhile."""
        end = time.monotonic() + seconds
        while not self.state:
            self._create()
            reason, said = self._job_ends(disturb, end)
            self._terminate()
            if reason == "Complete":
                self.state, self.message = "Completed", said
            else:
                self._act(reason, said)
        return self

    def disrupt(self, host):
        """Takes a node away: its pod gets SIGTERM, and has the condition DisruptionTarget."""
        self._disrupted.add(host)
        self.pods[host].send_signal(signal.SIGTERM)

    def _create(self):
        self._disrupted.clear()
        self.began = time.monotonic()
        assert self._job["completionMode"] == "Indexed" and self._job["parallelism"] == self._job["completions"]
        self.pods = [self._pod(host) for host in range(self._job["completions"])]

    def _pod(self, host):
        """Names of pods in the cluster's DNS are loopback addresses here, which `Here` gives."""
        values = {}
        for variable in self._container["env"]:
            by_field = variable.get("valueFrom")
            if by_field:
                assert by_field == {"fieldRef": {"fieldPath": INDEX}}
            values[variable["name"]] = str(host) if by_field else variable["value"]
        assert len(values.pop("AXIAL_HOSTS").split(",")) == self._job["completions"]
        return self._here.start(host, self._container["command"], values)

    def _job_ends(self, disturb, end):
        """(reason, message) of the Job's end."""
        (succeeds,) = self._job["successPolicy"]["rules"]
        while True:
            assert time.monotonic() < end, self._here.output(0)
            disturb(self)
            codes = [pod.poll() for pod in self.pods]
            if codes[int(succeeds["succeededIndexes"])] == 0:
                return "Complete", "Matched rules at index 0"
            for host, code in enumerate(codes):
                if code not in (None, 0):
                    return self._pod_failed(host, code if code > 0 else 128 - code)
            if time.monotonic() - self.began > self._job["activeDeadlineSeconds"]:
                return "DeadlineExceeded", "Job was active longer than specified deadline"
            time.sleep(0.02)

    def _pod_failed(self, host, code):
        pod = f"default/run-slice-0-{host}-abcde"
        assert self._job["backoffLimit"] == 0 and self._job["template"]["spec"]["restartPolicy"] == "Never"
        for index, rule in enumerate(self._job["podFailurePolicy"]["rules"]):
            matches = f"matching {rule['action']} rule at index {index}"
            exits = rule.get("onExitCodes")
            if exits and exits["containerName"] == self._container["name"] and code in exits["values"]:
                said = f"Container {self._container['name']} for pod {pod} failed with exit code {code} {matches}"
                return "PodFailurePolicy", said
            for condition in rule.get("onPodConditions", ()):
                if host in self._disrupted and condition == {"type": "DisruptionTarget", "status": "True"}:
                    return "PodFailurePolicy", f"Pod {pod} has condition DisruptionTarget {matches}"
        return "BackoffLimitExceeded", "Job has reached the specified backoff limit"

    def _act(self, reason, said):
        action = "RestartJobSet"
        for rule in self._policy["rules"]:
            patterns = rule.get("onJobFailureMessagePatterns", [""])
            if reason in rule["onJobFailureReasons"] and any(re.search(pattern, said) for pattern in patterns):
                action = rule["action"]
                break
        counts = action == "RestartJobSet"
        if action == "FailJobSet" or (counts and self.counted >= self._policy["maxRestarts"]):
            self.state, self.message = "Failed", said
            return
        self.restarts, self.counted = self.restarts + 1, self.counted + counts

    def _terminate(self):
        """Ends what is left of the pods: BlockingRecreate makes none before all are gone."""
        assert self._policy["restartStrategy"] == "BlockingRecreate"
        for pod in self.pods:
            if pod.poll() is None:
                pod.send_signal(signal.SIGTERM)
        end = time.monotonic() + GRACE
        while any(pod.poll() is None for pod in self.pods) and time.monotonic() < end:
            time.sleep(0.02)
        for pod in self.pods:
            slice_fixture.kill(pod)
