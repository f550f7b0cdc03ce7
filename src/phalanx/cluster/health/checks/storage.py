"""Check of the paths and URLs that a recipe names: each can be read or written, and how fast."""

from typing import Any

from phalanx.cluster.calibration.location_speed import describe_speed, measure_location, remove_probe
from phalanx.cluster.health.finding import CheckContext, HealthFinding, HealthVerdict
from phalanx.errors import PhalanxError, describe_os_error


def check_storage(context: CheckContext) -> list[HealthFinding]:
    """Measure each location of the context. One that cannot be used fails."""
    findings = []
    for place in context.locations:
        verdict, figures = HealthVerdict.FAIL, dict[str, Any]()
        try:
            speed = measure_location(place, context.probe_name)
        except (PhalanxError, OSError) as error:
            reason = describe_os_error(error) if isinstance(error, OSError) else str(error)
            reason = reason.replace(f"/{context.probe_name}", "")
        else:
            verdict = HealthVerdict.PASS if speed.latencies_s else HealthVerdict.UNKNOWN
            reason, figures = f"{place.location}: {describe_speed(speed)}", speed.model_dump()
            for name, (median_s, p99_s) in figures.pop("latencies_s").items():
                figures |= {f"{name}_median_s": median_s, f"{name}_p99_s": p99_s}
        findings.append(HealthFinding(f"storage/{place.key}", verdict, reason, figures))
    return findings


def remove_probes(payload: dict[str, Any]) -> None:
    """Remove what a measurement that was killed has written."""
    context = CheckContext.from_json(payload)
    for place in context.locations:
        remove_probe(place, context.probe_name)
