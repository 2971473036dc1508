"""The speeds that go into evidence records, all modules of one problem in turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fa3gen.records import evidence
from fa3gen.spec.model import Forward
from fa3gen.spec.specfile import Variant

if TYPE_CHECKING:
    import torch


def speeds(modules: Mapping[str, tuple[Variant[Forward], Any]], device: torch.device) -> dict[str, dict[int, float]]:
    """Measure (variant, module) by stem at the lengths that a record holds; TFLOP/s by stem and length.

    Modules of one problem and mask take turns, so that their records can be compared with each other. What could not
    be run is left out.
    """
    import torch

    from fa3gen.measure.bench import Competitor, CudaTimer, Runner, module_competitor, plan_cells

    def competitor(stem: str) -> Competitor:
        variant, module = modules[stem]
        return module_competitor(stem, variant.spec, lambda: module)

    cells = plan_cells([variant.spec for variant, _ in modules.values()], seq_lens=evidence.SEQ_LENS)
    runner = Runner([*map(competitor, modules)], CudaTimer(device), device, spend_ms=300, limit_ms=30_000)
    found: dict[str, dict[int, float]] = {stem: {} for stem in modules}
    for entry in runner.run(cells, on_progress=lambda text: None):
        for result in entry.results:
            if result.tflops is not None:
                found[result.competitor][entry.cell.seq_len] = result.tflops
    torch.cuda.empty_cache()  # k1 took gigabytes for its scores; also the first to notice a lost device
    torch.cuda.synchronize(device)
    return found
