"""benchmarks/peers.py, without MaxText."""

import math

import pytest


@pytest.fixture
def script(benchmark_script):
    return benchmark_script("peers")


def test_both_sides_do_the_same_work(script):
    for peer in map(script.Peer, script.PEERS):
        run = peer.run
        for program in peer.programs():
            options = program.maxtext_options
            sequences = options["per_device_batch_size"] * options["gradient_accumulation_steps"]
            assert sequences * program.gpus == run.batch.global_batch, peer.name
            assert options["compile_topology_num_slices"] * 8 == program.gpus, peer.name
            assert options["base_num_decoder_layers"] == run.model.layers, peer.name
            accumulates = options["gradient_accumulation_steps"] > 1
            assert not (accumulates and program.dtype == "fp8"), peer.name
            assert math.prod(program.mesh.values()) == run.gpus, peer.name


def test_programs_that_differ_have_files_of_their_own(script, tmp_path):
    stems = [
        peer.stem(program, tmp_path)
        for peer in map(script.Peer, script.PEERS)
        for program in peer.programs()
    ]
    assert len(set(stems)) == len(stems)
