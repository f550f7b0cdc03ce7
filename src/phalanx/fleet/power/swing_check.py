"""Compare the blocking saves of concurrent jobs with the swing that their site allows. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.fleet.power.allocation import PoweredJob
from phalanx.fleet.power.stagger import plan_save_offsets
from phalanx.fleet.power_tree import PowerTree


@dataclass(frozen=True)
class SiteSwing:
    """Jobs with blocking saves on a site. `together_w`: fall of power when all save at once. `offsets_s`: by how much
    each job's saves come later, by name; None where they cannot be spread."""

    site: str
    together_w: float
    max_swing_w: float
    offsets_s: Mapping[str, float] | None

    @property
    def is_within(self) -> bool:
        """Whether the swing is allowed even if all save at once."""
        return self.together_w <= self.max_swing_w

    def __str__(self) -> str:
        text = (
            f"site {self.site}: blocking saves at once would swing {self.together_w / 1e3:.1f} kW of "
            f"{self.max_swing_w / 1e3:.1f} kW"
        )
        if self.is_within:
            return text
        if self.offsets_s is None:
            return f"{text}; they cannot be spread so far: save asynchronously, or less often"
        later = ", ".join(f"{name} {offset:.0f} s" for name, offset in self.offsets_s.items() if offset > 0)
        return f"{text}; start later: {later}"


def check_swings(tree: PowerTree, jobs: Sequence[PoweredJob]) -> list[SiteSwing]:
    """Return each site with a greatest swing and jobs with blocking saves."""
    found = []
    for site in tree.levels:
        members = [
            (job.name, job.saves)
            for job in jobs
            if job.saves is not None and job.devices and tree.find_site(next(iter(job.devices))) == site
        ]
        if not members or site.max_swing_w is None:
            continue
        offsets = plan_save_offsets([saves for _, saves in members], site.max_swing_w)
        names = [name for name, _ in members]
        by_name = None if offsets is None else dict(zip(names, offsets, strict=True))
        found.append(SiteSwing(site.name, sum(saves.swing_w for _, saves in members), site.max_swing_w, by_name))
    return found
