"""The page of what-if studies: a form with variants, and the comparison that a bounded simulation gives."""

from collections.abc import Mapping
from html import escape

from phalanx.app.bounded_simulation import MAX_DAYS, MAX_SEEDS, MAX_VARIANTS, TIME_LIMIT_S, SimulationRequest
from phalanx.errors import UsageError

DEFAULT_DAYS, DEFAULT_SEEDS = 30.0, 2


def parse_request(form: Mapping[str, str], fleet: str) -> SimulationRequest:
    """Return what a form asks for. UsageError for a number that is none."""
    variants = [line.strip() for line in form.get("what", "").splitlines() if line.strip()]
    try:
        days, seeds = float(form.get("days") or DEFAULT_DAYS), int(form.get("seeds") or DEFAULT_SEEDS)
    except ValueError:
        raise UsageError("days and seeds: expected numbers") from None
    return SimulationRequest(fleet, variants, days, seeds)


def render_what_if_page(form: Mapping[str, str], answer: str, refusal: str | None) -> str:
    """The page: the form as it was filled in, and the answer. With a refusal the form cannot be sent."""
    button = "<button>Simulate</button>"
    if refusal is not None:
        button = f'<button disabled>Simulate</button><p class="note">{escape(refusal)}</p>'
    days, seeds = (
        escape(form.get(name, f"{value:g}")) for name, value in (("days", DEFAULT_DAYS), ("seeds", DEFAULT_SEEDS))
    )
    what = form.get("what", "")
    return f"""<header><h1>What-if</h1></header>
<form method="post" action="what-if">
<p><label for="what">Variants, one a line, such as <code>power_cap=0.8</code>, <code>extra_racks=4</code>,
<code>site.plant.supply_c=35</code> or <code>spares=0.04 policy=srtf</code></label></p>
<p><textarea id="what" name="what" rows="{MAX_VARIANTS}" spellcheck="false">{escape(what)}</textarea></p>
<div class="bar-form">
<label>Days <input name="days" type="number" min="0.1" max="{MAX_DAYS:g}" step="any" value="{days}"></label>
<label>Seeds <input name="seeds" type="number" min="1" max="{MAX_SEEDS}" value="{seeds}"></label>
{button}</div>
<p class="note">Compared with the fleet file as it is, with the same seeds; {MAX_VARIANTS} variants and
{TIME_LIMIT_S:.0f} s at most. `phalanx simulate` has no such limits.</p>
</form>{answer}"""
