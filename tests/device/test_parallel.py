"""Groups of one cost nothing; two tensor-parallel ranks give the logits of one."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from headrace.base.errors import ConfigError
from headrace.device.distributed.groups import Group, ParallelGroups
from headrace.device.loading.loader import load_model
from headrace.device.ops.reference.ops import ReferenceOps
from tests.device.families import hf_logits, make_hf_model, save_hf_model
from tests.device.models import BLOCK_SIZE, Driver, make_config

IDS = list(range(5, 40))


def test_a_group_of_one_returns_its_argument() -> None:
    group, x = Group(), torch.ones(2)
    assert group.all_reduce(x) is x
    assert group.all_gather(x) is x
    assert group.share(7) == slice(0, 7)


@pytest.mark.parametrize(("layers", "stages"), [(7, 3), (4, 4), (5, 1), (6, 4)])
def test_stages_cover_all_layers_once(layers: int, stages: int) -> None:
    ranges = [ParallelGroups(pp=Group(rank, stages)).layer_range(layers) for rank in range(stages)]
    assert [i for r in ranges for i in r] == list(range(layers))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


def test_heads_that_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    save_hf_model(make_hf_model("llama"), tmp_path)
    with pytest.raises(ConfigError, match=r"attention heads \(4\) cannot be shared by 3"):
        load_model(make_config(tmp_path), ReferenceOps(), ParallelGroups(tp=Group(0, 3)))


def _run_rank(rank: int, folder: Path, store: Path, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2)
    tp = Group(rank, 2, dist.group.WORLD)
    loaded = load_model(make_config(folder), ReferenceOps(), ParallelGroups(tp=tp))
    backend = loaded.attention.backend
    specs = [backend.make_spec(facts, BLOCK_SIZE, "float32") for facts in loaded.model.layer_facts()]
    driver = Driver(loaded.model, [backend.allocate(spec, 32) for spec in specs])
    torch.save((driver.run(IDS, [20, 15]), tp.all_gather(torch.full((1,), float(rank)))), out)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama-bias", "phi3", "gemma2"])
def test_two_ranks_give_the_logits_of_one(family: str, tmp_path: Path) -> None:
    hf = make_hf_model(family)
    folder = save_hf_model(hf, tmp_path / "model")
    outs = [tmp_path / f"out{rank}" for rank in range(2)]
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=_run_rank, args=(i, folder, tmp_path / "store", outs[i])) for i in range(2)]
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(timeout=100)
            assert process.exitcode == 0
    finally:
        for process in ranks:
            process.kill()
    for out in outs:
        logits, gathered = torch.load(out)
        torch.testing.assert_close(logits, hf_logits(hf, IDS), atol=1e-4, rtol=1e-4)
        assert gathered.tolist() == [0.0, 1.0]
