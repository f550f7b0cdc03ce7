"""Series of devices by a thermal model of two numbers, with faults."""

import numpy as np

from phalanx_fleet.thermal.device_series import DAY_S, HOUR_S, DeviceSeries, Values
from phalanx_fleet.thermal.fit import KindConstants, ThermalModelFile

T0_C = 28.0
R_K_PER_W = 0.1
MAX_POWER_W = 400.0
MODEL = ThermalModelFile(
    kinds={
        "GPU": KindConstants(
            t0_c=T0_C, r_k_per_w=R_K_PER_W, rmse_k=1.5, max_power_w=MAX_POWER_W, num_devices=4, num_samples=1000
        )
    }
)


def make_hours(
    days: int = 42,
    seed: int = 0,
    node: str = "n1",
    device: str = "0",
    extra_r_k_per_w: Values | float = 0.0,
    inlet_rise_k: Values | float = 0.0,
    limit_c: float = 200.0,
) -> DeviceSeries:
    """Hours of a device that works half of the time, in blocks of hours.

    It needs one parameter per fault: what is added to its resistance and to its inlet by hour, and the temperature at
    which it throttles.
    """
    rng = np.random.default_rng(seed)
    hours = days * 24
    power = np.repeat(rng.choice([60.0, 390.0], hours // 6), 6) + rng.normal(0, 3, hours)
    resistance = R_K_PER_W + extra_r_k_per_w
    inlet = T0_C + inlet_rise_k + rng.normal(0, 1.0, hours)
    power = np.minimum(power, (limit_c - inlet) / resistance)
    temperature = inlet + resistance * power
    missing = np.full(hours, np.nan)
    time = np.arange(hours) * HOUR_S
    return DeviceSeries(node, device, "GPU", time, power, temperature, missing, missing, missing)


def find_hours_from(days: int, from_day: float) -> Values:
    """Return 1 from a day on, else 0, by hour."""
    return (np.arange(days * 24) * HOUR_S >= from_day * DAY_S).astype(float)
