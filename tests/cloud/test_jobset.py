"""The JobSet's own command lines as processes under its own rules, disturbed at random."""

import os
import random
import signal
import time

import pytest

from axial import slices
from axial.cloud.engine import Request
from axial.cloud.gke import RESTARTS, Gke
from tests.cloud import slice_fixture
from tests.cloud.jobset import JobSet

SEED = int(os.environ.get("AXIAL_SEED", "0"))


def jobset(here, *arguments, hosts=1, **options):
    """A `JobSet` of the YAML that the engine writes. Waits are short."""
    run = here.describe(*arguments, hosts=hosts, generation="v5e", **options)
    slice_ = slices.find_slice("v5e-8")
    return JobSet(here, Gke(Request("run", slice=slice_, runtime="image")).text(run))


class Disturber:
    """Calls one of some faults at random moments, some times."""

    def __init__(self, seed, faults, times, pause):
        self._random, self._faults, self._left, self._pause = random.Random(seed), faults, times, pause
        self._next, self.done = 0.0, []

    def __call__(self, here):
        now = time.monotonic()
        if self._next < here.began:  # a new start
            self._next = here.began + self._random.uniform(*self._pause)
        if self._left and now > self._next:
            self._left -= 1
            name = self._random.choice(sorted(self._faults))
            self.done.append(name)
            self._faults[name](here, self._random.randrange(len(here.pods)))
            self._next = now + self._random.uniform(*self._pause)


def disrupt(jobset, host):
    jobset.disrupt(host)


def crash(jobset, host):
    """The container's memory is out: SIGKILL for all of it."""
    slice_fixture.kill(jobset.pods[host])


def kill_trainer(jobset, host):
    """Of the trainer alone; its supervisor tries again."""
    for pid in slice_fixture.below(jobset.pods[0].pid):
        if "axial-train" in slice_fixture.command_of(pid):
            os.kill(pid, signal.SIGKILL)


def disrupt_at(here, steps, host=0):
    """A disturbance that takes a host's node away at each of the steps. The trainer waits there, however fast it is."""
    here.plan(*(f"{step} hang" for step in steps))
    left = list(steps)

    def disturb(jobset):
        if left and here.saved() >= left[0]:
            left.pop(0)
            jobset.disrupt(host)

    return disturb


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 3])
@pytest.mark.parametrize("seed", range(SEED, SEED + 4))
def test_random_kills_end_with_the_weights_of_an_untouched_run(here, hosts, seed):
    made = jobset(here, "--pause=0.1", "--steps=60", hosts=hosts)
    disturber = Disturber(seed, {"disrupt": disrupt, "crash": crash, "kill": kill_trainer}, RESTARTS, (0.6, 2.0))
    made.run(disturber)
    assert made.state == "Completed", (disturber.done, here.output(0))
    assert here.weights() == slice_fixture.untouched(60) and "TWO TRAINERS" not in here.log
    assert made.counted <= disturber.done.count("crash")


def test_preemptions_do_not_count(here):
    steps = range(4, 4 * (RESTARTS + 2), 4)
    made = jobset(here).run(disrupt_at(here, steps))
    assert made.state == "Completed" and made.restarts == RESTARTS + 1 and made.counted == 0
    assert here.weights() == slice_fixture.untouched()


def test_lost_hosts_do_not_count(here):
    """The host that is lost has no word for it; the first one ends with 42 for it, or the crash counts."""
    made = jobset(here, hosts=3).run(disrupt_at(here, [6, 12], host=2))
    assert made.state == "Completed" and made.restarts == 2 and made.counted == 0
    assert here.weights() == slice_fixture.untouched()


def test_bad_input_ends_the_set(here):
    here.plan("4 2")
    made = jobset(here).run()
    assert made.state == "Failed" and "exit code 2 matching FailJob rule at index 0" in made.message
    assert made.restarts == 0 and len(here.starts()) == 1


def test_the_deadline_ends_the_set_whatever_has_happened(here):
    made = jobset(here, "--pause=0.05", "--steps=100000", seconds=8)
    made.run(Disturber(0, {"disrupt": disrupt}, 2, (0.8, 1.2)))
    assert made.state == "Failed" and "exit code 124 matching FailJob rule at index 0" in made.message
    assert made.restarts >= 1 and made.counted == 0


def test_a_trainer_that_always_fails_ends_the_set(here):
    here.plan(*["2 1"] * 3 * (RESTARTS + 1))
    made = jobset(here).run()
    assert made.state == "Failed" and "backoff limit" in made.message
    assert made.counted == RESTARTS and len(here.starts()) == 3 * (RESTARTS + 1)


def test_the_backstop_ends_what_no_supervisor_ends(here):
    here.plan("2 hang")
    made = jobset(here)
    made._job["activeDeadlineSeconds"] = 2
    made.run()
    assert made.state == "Failed" and "deadline" in made.message and made.restarts == 0
