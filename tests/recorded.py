"""A stand-in for CUDA graphs on a CPU."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from gateway.static_decoder import Batch, StaticDecoder, Work


class RecordedDecoder(StaticDecoder):
    """Each bucket's operators are recorded at its first use and replayed from then on, over the same
    buffers: a number that the host put into a pass, or read out of it, would stay that of the first."""

    def _record(self, batch: Batch, work: Work) -> Callable[[], tuple[Tensor, ...]]:
        recorded = make_fx(lambda: work(batch))()
        assert "_local_scalar_dense" not in recorded.code, "the host waits for a number"
        return recorded
