"""From an `nn.Module` to its `Profile`, without memory and without time; see following.py."""

from phalanx.plan.tracing.blocks import repeated
from phalanx.plan.tracing.following import build, image_loss, language_loss, profile, profile_fake, profile_mixed

__all__ = ["build", "image_loss", "language_loss", "profile", "profile_fake", "profile_mixed", "repeated"]
