"""Laws of many ranks: two processes train what one trains, replicated or sharded, and
one goes on where two stopped."""

import multiprocessing
import os
import socket

import pytest
import torch
from laws import TOLERANCE
from training import GAIN, KilledError, Killer, left_by, same, small_recipe, trained

import amor
from amor.data.loader import Batches
from amor.data.shards import Shards
from amor.errors import AmorError
from amor.train.distributed import buckets, init_world
from amor.train.loop import train

MODES = ("ddp", "fsdp")
NEAR = 1e-5  # of weights and losses; float32


def recipe_for(data, mode, **keys):
    # one rank cuts it 3 + 3 + 2, two cut it 3 + 1 each
    return small_recipe(data, batch=8, micro_batch=3, lr={"peak": 5e-4}, distributed=mode, **keys)


def _rank(rank, ports, data, out):
    """What each of two processes does: a whole run, one stopped in the middle and one stopped
    and resumed, in either mode."""
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
    }
    ports = iter(ports)
    for mode in MODES:
        os.environ["MASTER_PORT"] = str(next(ports))
        train(recipe_for(data, mode), out / mode)
        os.environ["MASTER_PORT"] = str(next(ports))
        train(recipe_for(data, mode), out / f"{mode}-stopped", observers=[Stopping(5)])
        for observers in ([Stopping(3)], []):
            os.environ["MASTER_PORT"] = str(next(ports))
            train(recipe_for(data, mode), out / f"{mode}-resumed", observers=observers)
    os.environ["MASTER_PORT"] = str(next(ports))
    train(recipe_for(data, "fsdp", changes=GAIN), out / "gain")


class Stopping(Killer):
    """Asks rank 0 alone to stop."""

    def on_step(self, metrics):
        if metrics.step == self.step:
            os.kill(os.getpid(), 15)


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@pytest.fixture(scope="module")
def two(prepared, tmp_path_factory):
    """The folder where two ranks have left their runs."""
    out = tmp_path_factory.mktemp("two")
    ports = free_ports(4 * len(MODES) + 1)
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(rank, ports, prepared, out)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0, 0]
    return out


@pytest.fixture(scope="module")
def one(prepared, tmp_path_factory):
    out = tmp_path_factory.mktemp("one") / "run"
    return trained(recipe_for(prepared, "none"), out) | {"folder": out}


def alike(a, b):
    """Weights, losses and thresholds near, decisions equal."""
    for name, t in a["weights"].items():
        assert torch.allclose(t, b["weights"][name], rtol=0, atol=NEAR), name
    for x, y in zip(a["metrics"], b["metrics"], strict=True):
        assert x["step"] == y["step"]
        if "loss" in x:
            assert y["loss"] == pytest.approx(x["loss"], abs=NEAR)
            assert y["grad_norm"] == pytest.approx(
                x["grad_norm"], rel=NEAR
            )  # AdamW would hide a factor
            assert [block["fire"] for block in x["blocks"]] == [
                block["fire"] for block in y["blocks"]
            ]
            assert [block["tau"] for block in x["blocks"]] == pytest.approx(
                [block["tau"] for block in y["blocks"]], abs=1e-6
            )


def decisions(folder, data):
    tokens, _ = Batches(Shards.open(data / "valid"), 24, 8, 1).rows(0, 0, 8)
    with torch.no_grad():
        return torch.stack([gate.fire for gate in amor.load(folder)[0](tokens).gates])


@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_are_one(prepared, two, one, mode):
    both = left_by(two / mode)
    alike(one, both)
    first = [line["blocks"] for line in (one["metrics"][0], both["metrics"][0])]
    used = [[(b["mu"], b["sigma"], b["fire"]) for b in blocks] for blocks in first]
    assert used[0] == used[1]  # to the bit
    fired = decisions(one["folder"] / "latest", prepared)
    assert 0.05 < fired.float().mean() < 0.95
    assert torch.equal(decisions(two / mode / "latest", prepared), fired)


def test_two_ranks_measure_what_one_does(prepared, two, tmp_path):
    alone, both = (
        trained(recipe_for(prepared, "none", changes=GAIN), tmp_path / "run"),
        left_by(two / "gain"),
    )
    alike(alone, both)
    assert alone["weights"]["blocks.0.gate.pred_std"] > 0, "it predicts"
    assert int(both["weights"]["blocks.0.gate.measured"]) == 6 * 8


@pytest.mark.parametrize("mode", MODES)
def test_a_run_of_two_ranks_goes_on_alone(prepared, two, one, mode):
    stopped = left_by(two / f"{mode}-stopped")
    assert stopped["trainer"]["step"] == 5  # a signal to one rank stopped both, after the same step
    again = trained(recipe_for(prepared, "none"), two / f"{mode}-stopped")
    assert [line.step for line in again["watch"].steps] == [6]
    alike(one, again)
    for name, t in one["moments"].items():
        assert torch.allclose(t, again["moments"][name], rtol=0, atol=TOLERANCE[torch.float32]), (
            name
        )


@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_that_stop_and_resume_are_two_that_never_stopped(two, mode):
    same(left_by(two / f"{mode}-resumed"), left_by(two / mode))


def test_gradients_are_summed_in_groups_that_hold_each_of_them_once():
    tensors = [torch.zeros(n) for n in (3, 1, 10, 2, 2)]
    groups = list(buckets(tensors, 4))
    assert [[t.numel() for t in group] for group in groups] == [[3, 1], [10], [2, 2]]


def test_ranks_must_be_asked_for_and_must_share_the_batch_evenly(prepared, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(AmorError, match="distributed=ddp"):
        init_world("none", "cpu")
    monkeypatch.undo()
    world = init_world("fsdp", "cpu")  # one process shares with nobody
    assert (world.size, world.local_rows(7)) == (1, (0, 7))
    world.size, world.rank = 2, 1
    assert world.local_rows(8) == (4, 8)
    with pytest.raises(AmorError, match="multiple of 2"):
        world.local_rows(7)
    with pytest.raises(KilledError):
        train(recipe_for(prepared, "fsdp"), tmp_path / "run", observers=[Killer(1)])
