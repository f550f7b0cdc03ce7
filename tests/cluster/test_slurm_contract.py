"""Every promise of an engine, kept by a real Slurm."""

import os

import pytest
from rig import Rig

from engine_contract import EngineContract
from phalanx.jobs.engines.slurm import Slurm


class TestContract(EngineContract):
    patience = 90.0

    @pytest.fixture
    def engine(self, rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> Slurm:
        return Slurm(rig.run, tmp_path_factory.mktemp("slurm"), os.environ)
