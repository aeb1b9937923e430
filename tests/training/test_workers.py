"""Trainings on several processes, which find each other by TF_CONFIG as several hosts do."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from axial.errors import InputError
from axial.training.strategy import cluster_workers, make_strategy
from tests.cloud.slice_fixture import free_port, until
from tests.training.runs import curve, run, weights

PATH = list(sys.path)
WORKER = """
import os, sys, time
sys.path[:0] = {path!r}
from tests.training.runs import run
from axial.cli import app, flags
from axial.training import strategy as strategies
from axial.training.train_step import TrainStep

strategies.GATHER_SECONDS = 60
run_loop = TrainStep.run
TrainStep.run = lambda *args: (time.sleep({pause}), run_loop(*args))[1]

def main(_):
    strategy = strategies.make_strategy("mirrored")
    options = dict(steps={steps}, batch=8, eval_interval={eval_interval}, profile={profile})
    run({data!r}, {model!r}, strategy=strategy, **options)

sys.argv[0] = "train"
app.run({{"": (flags.Flags, main)}})
"""


def launch(text, count, stdout=None):
    """Starts `count` processes of the program `text`. Each process is a worker of one cluster."""
    cluster = {"worker": [f"localhost:{free_port()}" for _ in range(count)]}
    workers = []
    for index in range(count):
        config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
        env = {**os.environ, "TF_CONFIG": config, "TF_CPP_MIN_LOG_LEVEL": "3"}
        pipes = {"stdout": stdout, "stderr": subprocess.PIPE}
        workers.append(subprocess.Popen([sys.executable, "-c", text], env=env, text=True, **pipes))
    return workers


def start(data_dir, model_dir, count, steps=6, pause=0.0, eval_interval=0, profile=None):
    """Starts a training of the small task on `count` workers. Returns the processes."""
    values = dict(steps=steps, pause=pause, eval_interval=eval_interval, profile=profile)
    return launch(WORKER.format(path=PATH, data=data_dir, model=str(model_dir), **values), count)


def ends(processes):
    """Waits for processes. Returns [(exit code, last line of standard error)]."""
    messages = [process.communicate()[1] for process in processes]
    return [(p.returncode, (m.strip().splitlines() or [""])[-1]) for p, m in zip(processes, messages)]


def wait_for(path, processes):
    until(lambda: path.exists() or any(p.poll() is not None for p in processes), 600)
    assert path.exists(), ends(processes)


@pytest.fixture(scope="module")
def four(colours_dir, tmp_path_factory):
    """The folder of a training of six steps on four workers, with an evaluation and a trace."""
    path = tmp_path_factory.mktemp("four")
    endings = ends(start(colours_dir, path, 4, eval_interval=6, profile=(2, 3)))
    assert [code for code, _ in endings] == [0] * 4, endings
    return path


@pytest.mark.slow  # four processes, minutes
def test_four_workers_equal_one_process(colours_dir, tmp_path, four):
    """At the same global batch, four workers have the losses of one process. Only the chief writes files."""
    run(colours_dir, tmp_path, steps=6, batch=8)
    one, many = curve(tmp_path), curve(four)
    assert set(one) == set(many) == {2, 4, 6}
    np.testing.assert_allclose(many[2], one[2], rtol=1e-3)
    np.testing.assert_allclose(many[6], one[6], rtol=0.05)  # RAdam's first steps amplify rounding
    assert json.loads((four / "status.json").read_text())["state"] == "done"
    assert json.loads((four / "best" / "scores.json").read_text())["step"] == 6
    assert len(list(four.glob("events*"))) == 1
    assert len(list(four.glob("plugins/profile/*/*.xplane.pb"))) == 1


@pytest.mark.slow  # twelve processes, many minutes
def test_a_lost_worker_stops_the_others_and_the_run_goes_on(colours_dir, tmp_path, four):
    """A killed worker or a stop request to one worker stops all workers. The resumed run equals an untouched run."""
    processes = start(colours_dir, tmp_path, 4, pause=2.0)
    wait_for(tmp_path / "ckpt-2.index", processes)
    processes[2].send_signal(signal.SIGKILL)
    lost, others = processes.pop(2), processes
    assert lost.wait() == -signal.SIGKILL
    for code, line in ends(others):
        assert code == 42 and "another worker has stopped" in line and str(tmp_path) in line, line
    # A stop request to one worker stops all workers at the same step.
    processes = start(colours_dir, tmp_path, 4, pause=2.0)
    wait_for(tmp_path / "ckpt-4.index", processes)
    processes[3].send_signal(signal.SIGTERM)
    endings = ends(processes)
    assert [code for code, _ in endings] == [42] * 4, endings
    assert all("saved at step" in line for _, line in endings)
    assert [code for code, _ in ends(start(colours_dir, tmp_path, 4))] == [0] * 4
    whole, parts = weights(four), weights(tmp_path)
    assert whole.keys() == parts.keys()
    assert all(np.array_equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize(
    "text", ["{", '{"cluster": {"worker": ["a:1"], "ps": ["b:1"]}, "task": {"type": "worker", "index": 0}}']
)
def test_a_wrong_cluster_is_named(text, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(InputError, match="TF_CONFIG=.* expected"):
        cluster_workers()


def test_two_workers_meet_after_all_imports_of_a_training():
    """Two workers that first import all modules of a training connect, and sum 3 and 4 to 7."""
    text = f"""
import sys
sys.path[:0] = {PATH!r}
from tests.training.runs import run
from axial.recipes import configuration
from axial.cli import train
from axial.training import strategy as strategies, trainer
strategies.GATHER_SECONDS = 60
strategy = strategies.make_strategy("mirrored")
total = strategies.total_over_workers(strategy, 3 if strategies.is_chief(strategy) else 4)
print(strategy.num_replicas_in_sync, int(total))
"""
    answers = [process.communicate() for process in launch(text, 2, stdout=subprocess.PIPE)]
    assert [out.strip() for out, _ in answers] == ["2 7"] * 2, answers


def test_a_worker_that_never_comes_is_named():
    """If a worker waits for another worker in vain, an alarm ends it with a line that says what to do."""
    text = """
from axial.training import strategy
strategy.GATHER_SECONDS = 2
strategy.make_strategy("mirrored")
"""
    process, other = launch(text, 2)
    other.kill()
    other.communicate()
    message = process.communicate()[1]
    assert process.returncode == -signal.SIGALRM, message
    assert "TF_CONFIG: ends if not all of its 2 workers come in 2 s; then start the same" in message


def test_workers_need_the_mirrored_strategy(monkeypatch):
    cluster = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    assert cluster_workers() == 2
    with pytest.raises(InputError, match="TF_CONFIG names 2 workers: --strategy=mirrored"):
        make_strategy("default")
    monkeypatch.delenv("TF_CONFIG")
    assert cluster_workers() == 1
