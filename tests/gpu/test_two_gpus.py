"""On a host with two Hopper GPUs: calls on the one that is not the current one, and a tuning run on both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fa3gen
from fa3gen.cli import main
from fa3gen.cli.tune import find_gpus
from fa3gen.design.masks import reach
from fa3gen.design.workspace import Workspace
from fa3gen.records import tuning_records
from fa3gen.run.launch import load_for_launch
from fa3gen.verify import reference

WORKSPACE = Workspace.find(Path(__file__).parent)
TOLERANCE = 0.01  # relative Frobenius error of O; 16-bit kernels read about 0.002


@pytest.fixture
def two_gpus(hopper: object) -> tuple[torch.device, torch.device]:
    """The current GPU and another one, or a skip that says how many there are."""
    gpus = find_gpus()
    if len(gpus) < 2:
        pytest.skip(f"needs two Hopper GPUs; this host has {len(gpus)}")
    return torch.device("cuda", 0), torch.device("cuda", 1)


def tensors(dim: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator(device).manual_seed(0)
    facts: dict[str, Any] = {"dtype": torch.bfloat16, "device": device, "generator": generator}
    return tuple(torch.randn(2, seq, heads, dim, **facts) for seq, heads in ((700, 4), (900, 2), (900, 2)))


# A CTA per tile, tiles from a counter, the last wave in shares: what launches share differs.
@pytest.mark.parametrize("stem", ["k4_2_d64", "fwd_d64_causal", "fwd_d64", "fwd_d128_static"])
def test_calls_run_where_their_tensors_are(stem: str, two_gpus: tuple[torch.device, torch.device]) -> None:
    module = load_for_launch(WORKSPACE.module_path(stem))
    (variant,) = WORKSPACE.resolve(stem)
    results = []
    for device in (*two_gpus, *two_gpus):
        q, k, v = tensors(module.HEAD_DIM, device)
        out, lse = module.attention(q, k, v, return_lse=True)
        assert out.device == lse.device == device and torch.cuda.current_device() == two_gpus[0].index
        expected = reference.attention(q, k, v, reach=reach(variant.spec.mask)).out
        assert torch.linalg.norm(out.double() - expected) < TOLERANCE * torch.linalg.norm(expected)
        results.append((out.cpu(), lse.cpu()))
    assert all(torch.equal(x, y) for other in results[1:] for x, y in zip(results[0], other, strict=True))


@pytest.mark.parametrize("stem", ["fwd_d64_causal", "fwd_d64"])
def test_streams_and_graphs_of_the_other_gpu(stem: str, two_gpus: tuple[torch.device, torch.device]) -> None:
    """Captured while the other GPU is the current one, and while the first is: torch tells of the current one only."""
    module: Any = load_for_launch(WORKSPACE.module_path(stem))
    first, other = two_gpus
    q, k, v = tensors(module.HEAD_DIM, other)
    wanted = module.attention(q, k, v)
    torch.cuda.synchronize(other)
    for current in (other, first):
        made = module.slot.cache_info().currsize
        stream, graph = torch.cuda.Stream(other), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream), torch.cuda.device(current):
            assert module.attention(q, k, v).equal(wanted)
        with torch.cuda.device(other):
            with torch.cuda.graph(graph, stream=stream), torch.cuda.device(current):
                out = module.attention(q, k, v, out=torch.empty_like(wanted))
            graph.replay()
        torch.cuda.synchronize(other)
        assert out.equal(wanted)
        assert module.slot.cache_info().currsize == made + 2  # as itself, and in the capture


def test_operands_on_two_gpus_are_refused(two_gpus: tuple[torch.device, torch.device]) -> None:
    q, k, v = tensors(64, two_gpus[0])
    with pytest.raises((TypeError, ValueError), match="argument #1"):
        fa3gen.attention(q, k.to(two_gpus[1]), v)


def test_a_tuning_run_uses_both(
    two_gpus: tuple[torch.device, torch.device],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(WORKSPACE.root)
    found = tmp_path / "found.json"
    lengths = ["--seq", "1024,2048", "--rounds", "9", "--no-peers"]
    files = ["--work", str(tmp_path / "work"), "--json", str(found)]
    assert main(["tune", "--measure", "k6_d64", "fwd_d64", *lengths, *files]) == 0
    said = capsys.readouterr().err
    assert all(f"GPU {gpu}: loaded 2 modules" in said for gpu in find_gpus()[:2])
    assert [record.problem.seq_k for record in tuning_records.load(found)] == [1024, 2048]
