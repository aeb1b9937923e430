"""The loop of `axial-tpu run`: from a request for a slice to a training that has reached its last step.

    look at the slice -> make it, wait for it -> install -> start the trainer -> print its log
          ^                                                                            |
          |  preempted, suspended: delete, then make it again; 42 or a dead worker:    |
          +----------------------- start the trainer again ----------------------------+

A preempted slice is deleted before it is made again, as it holds its name and its quota until then
(https://github.com/skypilot-org/skypilot/pull/1483).
"""

import dataclasses
import os
import time

from axial.cloud import workers as on_workers
from axial.cloud.backend import State
from axial.cloud.calls import NoQuota, is_quota
from axial.errors import InputError, Preempted
from axial.io import show
from axial.io.schemas import STATUS

ENDS = {2: "bad input", 70: "a fault of axial"}  # exit codes of the trainer that another start would not change
MOST_FAILURES = 3
MOST_QUOTA_WAITS = 10
LONGEST_WAIT = 300.0  # seconds
SECONDS_TO_SAVE = 90.0


class Ended(Exception):
    """The run is over without its last step. `code` is the command's exit code."""

    def __init__(self, message, code=1):
        super().__init__(message)
        self.code = code


class TimeUp(Exception):
    """The time limit is over."""


@dataclasses.dataclass(frozen=True)
class Seam:
    """What the loop has from outside.

    Attributes:
        read_status: function that returns the run's `RunStatus`, or None if there is none yet.
        say: function of a line.
        wait: function of seconds.
        poll: seconds between two looks.
        limit: seconds that the slice may be active; None for any time.
        now: function that returns seconds.
    """

    read_status: object
    say: object = show.say
    wait: object = time.sleep
    poll: float = 15.0
    limit: float | None = None
    now: object = time.monotonic


class Loop:
    """See the module."""

    def __init__(self, backend, job, seam):
        """
        Args:
            backend: a `Backend`.
            job: a `workers.Job`.
            seam: a `Seam`.
        """
        self._backend, self._job, self._seam = backend, job, seam
        self._shell = on_workers.Shell(backend, seam.say)
        self._deadline = None
        self._asked = self._was_active = self._deleted = False
        self._said = None
        self._byte, self._failures, self._last_step, self._quota_waits = 1, 0, -1, 0

    def run(self):
        """Returns when the last step is reached.

        Raises:
            Ended, InputError: it cannot be reached.
            Preempted: the time limit is over; the slice is deleted.
        """
        workers = None
        try:
            while True:
                workers = self.bring_up()
                code = self.train(workers)
                if self._is_done(code):
                    return
                self._count(code)
        except TimeUp:
            self._end_of_time(workers)

    # === The slice ===

    def bring_up(self):
        """Makes the slice, or finds it, and returns its workers when it is active."""
        while True:
            status = self._look()
            if status.state not in (State.ABSENT, State.DELETING):
                self._check()
            if status.state is State.ACTIVE:
                workers = self._backend.workers()
                if len(workers) == self._backend.request.slice.hosts:
                    self._now_active()
                    return workers
            elif status.state is State.ABSENT:
                self._create()
                continue
            elif status.state is State.STOPPED:
                raise InputError(
                    f"--name={self._name}: a person has stopped it ({status.detail or 'no reason'}); "
                    "axial-tpu delete removes it, then the run can go on"
                )
            elif status.state is State.FAILED:
                self._failed(status)
                continue
            elif status.state in (State.PREEMPTED, State.SUSPENDED) or self._is_in_pieces(status.state):
                self._delete("it holds its name and quota until it is deleted")
                continue
            self._pause(self._seam.poll)

    def _check(self):
        """Raises InputError if the slice of this name is another one."""
        other = "" if self._backend.made else self._backend.other()
        if other:
            raise InputError(f"--name={self._name}: is in use, by {other}; choose another name")

    @property
    def _name(self):
        return self._backend.request.name

    def _say(self, line):
        self._seam.say(f"axial-tpu: {line}")

    def _look(self):
        status = self._backend.status()
        if str(status) != self._said:
            self._said = str(status)
            self._say(f"{self._name} is {status}")
        return status

    def _is_in_pieces(self, state):
        """Whether a slice that was whole has lost a host, and waits for it."""
        return self._was_active and state in (State.WAITING, State.CREATING)

    def _now_active(self):
        self._asked = self._deleted = False
        self._was_active, self._quota_waits = True, 0
        if self._seam.limit and self._deadline is None:
            self._deadline = self._seam.now() + self._seam.limit

    def _create(self):
        try:
            self._backend.create()
        except NoQuota as error:
            if not self._deleted:
                raise
            self._wait_for_quota(error)
            return
        self._asked, self._was_active = True, False

    def _wait_for_quota(self, error):
        """Waits, longer each time, for the quota of the slice that this run has deleted."""
        self._quota_waits += 1
        if self._quota_waits > MOST_QUOTA_WAITS:
            raise Ended(f"{error}; the deleted slice has not given its quota back") from None
        self._say(f"{error}; waiting for the quota of the deleted slice")
        self._pause(min(self._seam.poll * 2**self._quota_waits, LONGEST_WAIT))

    def _failed(self, status):
        """Deletes a slice that could not be made, so that nothing is left that costs. Raises Ended if it is ours."""
        asked, deleted = self._asked, self._deleted
        self._delete("it could not be made")
        if asked and deleted and is_quota(status.detail):
            self._wait_for_quota(status.detail)
        elif asked:
            raise Ended(f"{self._name} could not be made: {status.detail}")
        self._asked = False

    def _delete(self, why):
        self._say(f"{self._name} is deleted: {why}")
        self._backend.delete()
        self._deleted, self._byte, self._said = True, 1, None

    def _pause(self, seconds):
        self._seam.wait(seconds)
        if self._deadline is not None and self._seam.now() > self._deadline:
            raise TimeUp

    # === The trainer ===

    def train(self, workers):
        """Installs, starts the trainer, and prints its log.

        Returns:
            the trainer's exit code; None if the slice is lost.
        """
        try:
            # an installation would change the sources under a trainer that runs
            if on_workers.is_running(self._shell, self._backend, workers, self._job):
                self._say("the trainer runs already; it goes on with the package that it was started with")
            else:
                on_workers.install(self._shell, workers, self._job)
                on_workers.start(self._shell, self._backend, workers, self._job)
        except InputError as error:
            return self._not_started(error)
        while True:
            follower = on_workers.Follower(self._shell, workers[0], self._job, byte=self._byte)
            try:
                lost = self._watch(follower)
            finally:
                follower.close()
                self._byte = follower.byte
            if follower.code is not None:
                return follower.code
            if lost:
                return None
            self._say("the connection to worker 0 has ended; the trainer goes on, connecting again")
            self._pause(self._seam.poll)

    def _not_started(self, error):
        """None if the slice is lost or a worker is only slow to answer; raises after some tries, and other errors."""
        if self._look().state is State.ACTIVE:
            if not isinstance(error, on_workers.Unreachable):
                raise error
            self._failures += 1
            if self._failures >= MOST_FAILURES:
                raise Ended(str(error))
            self._say(f"{error}; trying again")
            self._pause(self._seam.poll)

    def _watch(self, follower):
        """Waits until the log's connection ends or the slice is lost. Returns whether it is lost."""
        while follower.alive:
            follower.wait(self._seam.poll)
            if follower.code is None and self._look().state not in (State.ACTIVE, State.MAINTENANCE):
                return True
            self._pause(0)
        return follower.code is None and self._look().state not in (State.ACTIVE, State.MAINTENANCE)

    def _is_done(self, code):
        if code != 0:
            return False
        status = self._seam.read_status()
        if status is not None and status.state != "done":
            self._say(f"the trainer ended with 0, but {STATUS} says {status.state} at step {status.step}")
            return False
        return True

    def _count(self, code):
        """Raises Ended if another start of the trainer has no prospects. A lost slice is nobody's failure."""
        if code is None:
            return
        if code in ENDS:
            raise Ended(f"the trainer ended with {code}, {ENDS[code]}; its log says why: axial-tpu logs", code)
        status = self._seam.read_status()
        step = status.step if status else -1
        self._failures = 0 if step > self._last_step else self._failures + 1
        self._last_step = max(step, self._last_step)
        if self._failures >= MOST_FAILURES:
            raise Ended(
                f"the trainer ended {MOST_FAILURES} times without a new step (code {code}, step {max(step, 0)}); "
                "its log says why: axial-tpu logs"
            )
        self._say(f"the trainer ended with {code} at step {max(step, 0)}; it is started again")
        self._pause(self._seam.poll)

    def _end_of_time(self, workers):
        """Lets the trainer save, deletes the slice, and raises Preempted."""
        self._deadline = None
        if workers and self._backend.status().state in (State.ACTIVE, State.MAINTENANCE):
            on_workers.stop(self._shell, workers[0], self._job)
            follower = on_workers.Follower(self._shell, workers[0], self._job, byte=self._byte)
            follower.wait(SECONDS_TO_SAVE)
            follower.close()
        self._backend.delete()
        status = self._seam.read_status()
        where = f" at step {status.step} of {status.steps}" if status else ""
        raise Preempted(f"--time_limit is over: {self._name} is deleted{where}; the same command continues the run")


def status_path(model_dir):
    return os.path.join(model_dir, STATUS)
