"""The peak FLOP/s that MFU refers to."""

from dataclasses import dataclass


@dataclass
class PeakRate:
    """A peak in FLOP/s. Training that beats a measured peak shows that the peak was measured too low, on a busy
    machine; its own rate is then the peak."""

    flops_per_s: float

    def compute_mfu(self, model_flops_per_s: float) -> float:
        """Compute model FLOPs utilisation (Chowdhery et al. 2022, PaLM, appendix B): FLOP/s that the model needed at
        this speed, over the peak. At most 1."""
        self.flops_per_s = max(self.flops_per_s, model_flops_per_s)
        return model_flops_per_s / self.flops_per_s
