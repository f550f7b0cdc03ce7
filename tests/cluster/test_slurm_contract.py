"""Every promise of an engine, kept by a real Slurm."""

import os

import pytest
from rig import SlurmCluster

from engine_contract import BackendContract
from phalanx.jobs.engines.slurm import SlurmBackend


class TestContract(BackendContract):
    timeout_s = 90.0

    @pytest.fixture
    def engine(self, rig: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> SlurmBackend:
        return SlurmBackend(rig.run, tmp_path_factory.mktemp("slurm"), os.environ)
