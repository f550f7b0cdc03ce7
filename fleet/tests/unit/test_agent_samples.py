"""Samples as agents send them."""

import json

import pytest

from made_samples import full_node
from phalanx.run.fields import to_json
from phalanx.telemetry.sample import NodeSample
from phalanx_fleet.telemetry.prometheus import read_sample


@pytest.mark.parametrize("sample", [NodeSample(1.0), full_node(5.0, 10.0)])
def test_a_sample_travels_as_json(sample: NodeSample) -> None:
    assert read_sample(json.loads(json.dumps(to_json(sample)))) == sample


@pytest.mark.parametrize("found", [None, {}, {"time": 1, "host": {}, "devices": [{}]}, {"time": "x", "host": {}}, [1]])
def test_what_is_no_sample_is_an_error(found: object) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        read_sample(found)
