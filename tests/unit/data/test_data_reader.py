"""Batches: which tokens a sample has, where documents end, how mixtures and ranks share the samples."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data import IGNORE_INDEX, Prefetcher, RankBatch, shard
from phalanx.data.manifest import DatasetManifest
from phalanx.data.packing import TokenRanges, pack_documents
from phalanx.data.reader import PADDING_TOKEN
from phalanx.data.shard import ShardWriter
from phalanx.errors import DataError, RecipeError
from small_data import dataset, numbered, opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    shards = np.split(numbered(3000), [700, 701, 1500])
    return dataset(tmp_path_factory.mktemp("reader") / "dataset", shards, vocab=2**32)


def test_a_sample_is_a_window_within_a_shard_and_its_targets_are_one_further(folder):
    batch = opened(folder, sequence=10).read_training(0, 64)
    assert {name: (values.dtype, values.shape) for name, values in batch.items()} == {
        "tokens": (np.int64, (64, 10)),
        "targets": (np.int64, (64, 10)),
    }
    assert (batch["targets"] == batch["tokens"] + 1).all()
    first = batch["tokens"][:, 0]
    shard_start = np.select([first >= 1501, first >= 701, first >= 700], [1501, 701, 700], 0)
    shard_start = np.where(first >= 1500, 1500, np.where(shard_start == 1501, 1500, shard_start))
    assert ((first - shard_start) % 10 == 0).all()


def test_every_token_but_the_shards_ends_is_a_target_once_an_epoch(folder):
    data = opened(folder, sequence=10)
    targets = np.sort(data.read_training(0, data.num_train_samples)["targets"].ravel())
    expected = [*range(1, 691), *range(702, 1492), *range(1501, 2991)]
    assert targets.tolist() == expected


@given(first=st.integers(0, 40_000), count=st.integers(1, 40))
@settings(max_examples=30, deadline=None)
def test_samples_do_not_depend_on_how_they_are_asked_for(folder, first, count):
    together = opened(folder).read_training(first, count)["tokens"]
    data = opened(folder)
    alone = [data.read_training(first + i, 1)["tokens"][0] for i in reversed(range(count))]
    assert np.array_equal(together, alone[::-1])


def test_held_out_samples_are_none_that_training_sees(folder):
    data = opened(folder, share=0.1)
    held = data.read_validation(0, data.num_validation_samples)["targets"].ravel()
    trained = data.read_training(0, 3 * data.num_train_samples)["targets"].ravel()
    assert data.num_validation_samples == round(0.1 * (data.num_train_samples + data.num_validation_samples))
    assert not set(held.tolist()) & set(trained.tolist())


def test_a_source_of_its_own_for_evaluation_leaves_training_all_of_its_own(folder, tmp_path):
    other = dataset(tmp_path / "other", [numbered(500) + 10_000], vocab=2**32)
    data = opened(folder, evaluation={"source": {"prepared": str(other)}, "holdout_fraction": 0.5})
    assert data.num_train_samples == opened(folder).num_train_samples
    assert data.num_validation_samples == 499 // 8
    assert np.array_equal(np.sort(data.read_validation(0, 62)["tokens"].ravel()), 10_000 + np.arange(62 * 8))


def steps_on(data, world, consumed, steps, global_batch=12, micro=2):
    """Global batches put together from what every rank's feed gives."""
    feeds = [
        Prefetcher(data, RankBatch(global_batch, micro, rank, num_groups=world), consumed) for rank in range(world)
    ]
    try:
        return [
            np.concatenate([micro_batch["tokens"] for feed in feeds for micro_batch in next(feed)])
            for _ in range(steps)
        ]
    finally:
        for feed in feeds:
            feed.close()


def test_one_then_three_then_two_ranks_read_what_one_rank_reads(folder):
    whole = steps_on(opened(folder), 1, 0, 90)
    changing = [
        batch
        for world, first, last in ((1, 0, 30), (3, 30, 60), (2, 60, 90))
        for batch in steps_on(opened(folder), world, first * 12, last - first)
    ]
    assert np.concatenate(whole).tobytes() == np.concatenate(changing).tobytes()


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    root = tmp_path_factory.mktemp("mixture")
    return [
        dataset(root / str(number), [numbered(size) + number * 10_000], vocab=2**32)
        for number, size in enumerate((900, 300, 4000))
    ]


def test_a_mixture_takes_from_its_sources_by_weight(three):
    tokens = opened(*three, weights=[3, 1, 4]).read_training(0, 4000)["tokens"]
    source = tokens[:, 0] // 10_000
    assert np.bincount(source).tolist() == [1500, 500, 2000]
    for number in range(8, 4000, 8):
        assert np.abs(np.bincount(source[:number], minlength=3) - np.array([3, 1, 4]) * number / 8).max() <= 1


def test_every_source_of_a_mixture_has_epochs_of_its_own(three):
    data = opened(*three, weights=[3, 1, 4])
    tokens = data.read_training(0, 1000)["tokens"]
    small = tokens[tokens[:, 0] // 10_000 == 1]
    samples = (300 - 1) // 8
    assert len(small) > 3 * samples
    for epoch in range(3):
        met = small[epoch * samples : (epoch + 1) * samples, 0]
        assert len(set(met.tolist())) == samples


def test_a_mixture_holds_out_a_share_of_every_source(three):
    data = opened(*three, weights=[3, 1, 4], share=0.2)
    held = data.read_validation(0, data.num_validation_samples)["tokens"]
    trained = set(data.read_training(0, 5000)["tokens"].ravel().tolist())
    assert set((held[:, 0] // 10_000).tolist()) == {0, 1, 2}
    assert len(np.unique(held[:, 0])) == len(held)
    assert not trained & set(held.ravel().tolist())


def sources_of(batch):
    return batch["tokens"][:, 0] // 10_000


def test_the_sources_of_a_step_do_not_depend_on_the_number_of_workers(three):
    options = {"weights": [3, 1, 4], "global_size": 12}
    whole = np.concatenate(steps_on(opened(*three, **options), 1, 0, 100))
    for world in (2, 3, 6):
        assert np.concatenate(steps_on(opened(*three, **options), world, 0, 100)).tobytes() == whole.tobytes()
        for part in np.split(whole.reshape(100, 12, -1), world, axis=1):
            shares = np.bincount(part[:, :, 0].ravel() // 10_000, minlength=3) / (1200 / world)
            assert np.abs(shares - np.array([3, 1, 4]) / 8).max() < 0.03


def test_a_temperature_weighs_sources_by_their_training_samples(three):
    data = opened(*three, temperature=2, share=0.1)
    assert np.allclose(data.mixture.stages[0].weights, np.sqrt(np.array(data.mixture.num_samples) / 450), atol=0.01)
    shares = np.bincount(sources_of(data.read_training(0, 4000)), minlength=3) / 4000
    roots = np.sqrt(data.mixture.num_samples)
    assert np.abs(shares - roots / roots.sum()).max() < 0.001


CURRICULUM = [{"from_step": 41, "weights": [1, 1, 1]}, {"from_step": 71, "weights": [0, 0, 1]}]


def test_a_curriculum_gives_each_worker_its_weights_on_any_number_of_workers(three):
    options = {"weights": [3, 1, 0], "global_size": 12, "curriculum": CURRICULUM}
    whole = np.concatenate(steps_on(opened(*three, **options), 1, 0, 80))
    sources = whole.reshape(80, 12, -1)[:, :, 0] // 10_000
    for world in (2, 3):
        resumed = steps_on(opened(*three, **options), world, 36 * 12, 44)
        assert np.concatenate(resumed).tobytes() == whole[36 * 12 :].tobytes()
        for part in np.split(sources, world, axis=1):
            for first, stop, weights in ((0, 40, [3, 1, 0]), (40, 70, [1, 1, 1]), (70, 80, [0, 0, 1])):
                shares = np.bincount(part[first:stop].ravel(), minlength=3) / part[first:stop].size
                assert np.abs(shares - np.array(weights) / sum(weights)).max() < 0.05


def test_sources_of_a_curriculum_are_validated_by_their_mean_weights(three):
    data = opened(*three, weights=[3, 1, 0], share=0.1, curriculum=CURRICULUM)
    weights = [part.weight for part in data.choose_validation_parts(512)]
    assert np.allclose(np.array(weights) / sum(weights), [(3 / 4 + 1 / 3) / 3, (1 / 4 + 1 / 3) / 3, 4 / 9])


def test_fingerprints_are_the_same_in_every_release(three):
    assert opened(*three, weights=[3, 1, 4], global_size=8).fingerprint == "70b3e45490651660a5361b92b34cf9e8"
    assert opened(three[0]).fingerprint == "edba3e5e2a1534b6ab973af25d7d1235"


def test_each_source_is_validated_as_far_as_it_goes(three):
    data = opened(*three, share=0.1)
    assert [(part.count, part.weight) for part in data.choose_validation_parts(512)] == [(11, 1.0), (4, 1.0), (50, 1.0)]
    assert data.num_validation_samples == 65
    for part, number in zip(data.choose_validation_parts(20), range(3), strict=True):
        assert set(sources_of(data.read_validation(part.first, part.count)).tolist()) == {number}
    assert [part.count for part in data.choose_validation_parts(20)] == [8, 4, 8]


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """500 documents of 5 to 40 tokens and one of 100 in two shards; each token tells its place."""
    rng = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("examples") / "dataset"
    folder.mkdir()
    entries, documents, first = [], [], 1
    for number in range(2):
        with ShardWriter(folder, number, np.dtype("<u4")) as writer:
            for length in (*rng.integers(5, 41, 250), *([100] if number else [])):
                writer.start_document()
                writer.append_values(numbered(first + length)[first:])
                documents.append(range(first, first + length))
                first += length
            entries.append(writer.commit())
    DatasetManifest("tokens", "<u4", tuple(entries), 2**32 - 1, {"name": "bytes"}).write(folder)
    return folder, documents


@pytest.mark.parametrize("masking", [True, False])
def test_whole_packing_cuts_no_document_and_pads_the_rest(examples, masking):
    folder, documents = examples
    data = opened(folder, sequence=48, packing="whole", document_masking=masking)
    batch = data.read_training(0, data.num_train_samples)
    ends_with = {document[-1]: document for document in documents}
    met, num_tokens = [], 0
    for tokens, targets in zip(batch["tokens"].tolist(), batch["targets"].tolist(), strict=True):
        filled = [token for token in tokens if token != PADDING_TOKEN]
        num_tokens += len(filled)
        assert tokens == filled + [PADDING_TOKEN] * (48 - len(filled))
        assert set(targets[len(filled) :]) <= {IGNORE_INDEX}
        for place, (token, target) in enumerate(zip(filled, targets, strict=False)):
            if (document := ends_with.get(token)) is not None:
                met.append(document)
                size = len(document) if len(document) <= 48 else (len(document) - 1) % 48 + 1
                assert filled[place + 1 - size : place + 1] == list(document[-size:])
                is_last = place + 1 == len(filled)
                assert target == (IGNORE_INDEX if masking or is_last else filled[place + 1])
            else:
                assert target == token + 1
    assert sorted(map(len, met)) == sorted(map(len, documents))
    assert data.padding_fraction == pytest.approx(1 - num_tokens / batch["tokens"].size)
    assert data.count_units(0, data.num_train_samples) == num_tokens


def test_validation_of_whole_documents_shares_none_with_training(examples):
    folder, documents = examples
    data = opened(folder, sequence=48, packing="whole", share=0.2, document_masking=True)
    document_of = {token: number for number, document in enumerate(documents) for token in document}
    trained = data.read_training(0, data.num_train_samples)
    scored = data.read_validation(0, data.num_validation_samples)
    of_training, of_validation = (
        {document_of[token] for token in batch["targets"][batch["targets"] != IGNORE_INDEX].tolist()}
        for batch in (trained, scored)
    )
    assert not of_training & of_validation
    assert len(of_training | of_validation) == 501
    assert len(of_validation) == 100


def test_units_of_packed_samples_do_not_depend_on_how_they_are_asked_for(examples):
    data = opened(examples[0], sequence=48, packing="whole")
    counts = [data.count_units(number, 1) for number in range(0, 20_000, 1)]
    assert data.count_units(0, 20_000) == sum(counts)
    assert data.count_units(8190, 5) == sum(counts[8190:8195])


def test_a_long_document_is_cut_without_losing_a_target(tmp_path):
    folder = dataset(tmp_path / "dataset", [numbered(100) + 1], vocab=2**32 - 1)
    for sequence in (7, 9, 33, 99, 100, 120):
        data = opened(folder, sequence=sequence, packing="whole", document_masking=True)
        targets = data.read_training(0, data.num_train_samples)["targets"]
        assert sorted(targets[targets != IGNORE_INDEX].tolist()) == list(range(2, 101))


def test_a_document_that_continues_in_the_next_shard_is_on_one_side(tmp_path):
    folder = tmp_path / "dataset"
    folder.mkdir()
    entries = []
    for number, starts in enumerate(((0, 10), (), (20, 25))):
        with ShardWriter(folder, number, np.dtype("<u4")) as writer:
            for token in range(30):
                if token in starts:
                    writer.start_document()
                writer.append_values(np.array([30 * number + token + 1]))
            entries.append(writer.commit())
    DatasetManifest("tokens", "<u4", tuple(entries), 2**32 - 1, {"name": "bytes"}).write(folder)
    documents = [range(1, 11), range(11, 81), range(81, 86), range(86, 91)]
    for share in (0.3, 0.5, 0.75):
        data = opened(folder, sequence=16, packing="whole", share=share)
        scored = data.read_validation(0, data.num_validation_samples)["tokens"]
        trained = set(data.read_training(0, data.num_train_samples)["tokens"].ravel().tolist())
        sides = [({*document} & {*scored.ravel().tolist()}, {*document} & trained) for document in documents]
        assert all(not validated or not learnt for validated, learnt in sides)
        assert sum(bool(validated) for validated, _ in sides) == round(4 * share)


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=120), capacity=st.integers(5, 60))
@settings(max_examples=50, deadline=None)
def test_packing_is_best_fit_decreasing(lengths, capacity):
    lengths = [min(length, capacity) for length in lengths]
    stop = np.cumsum(lengths)
    documents = TokenRanges(np.zeros(len(lengths), np.int32), stop - lengths, stop)
    packed = pack_documents(documents, capacity)
    spaces: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [space for space in spaces if space >= length]
        spaces.remove(min(fitting)) if fitting else None
        spaces.append((min(fitting) if fitting else capacity) - length)
    assert sorted(packed.num_tokens.tolist()) == sorted(capacity - space for space in spaces)
    ranges = zip(packed.ranges.start.tolist(), packed.ranges.stop.tolist(), strict=True)
    assert sorted(ranges) == list(zip((stop - lengths).tolist(), stop.tolist(), strict=True))


def test_sources_with_other_tokenizers_do_not_mix(three, tmp_path):
    other = dataset(tmp_path / "bytes", [np.zeros(100, np.uint8)])
    with pytest.raises(RecipeError, match="cannot be mixed") as error:
        opened(three[0], other)
    assert error.value.code == 78


@pytest.mark.parametrize(("lengths", "has"), [([32], "32 tokens"), ([3, 6], "6 tokens in the longest of its 2 shards")])
def test_a_sequence_longer_than_every_shard_is_refused_with_their_tokens(tmp_path, lengths, has):
    short = dataset(tmp_path / "short", [np.zeros(length, np.uint8) for length in lengths])
    words = f"data.seq_len: 32 tokens and the next need at least 33, but {short} has only {has}$"
    with pytest.raises(RecipeError, match=words):
        opened(short, sequence=32)
    assert opened(short, sequence=max(lengths) - 1).num_train_samples == 1


def test_the_fingerprint_tells_everything_that_changes_the_order(three):
    fingerprints = [
        opened(three[0]).fingerprint,
        opened(three[1]).fingerprint,
        opened(three[0], sequence=9).fingerprint,
        opened(three[0], share=0.5).fingerprint,
        opened(three[0], document_masking=True).fingerprint,
        opened(three[0], three[1]).fingerprint,
        opened(three[0], three[1], curriculum=[{"from_step": 5, "weights": [1, 2]}]).fingerprint,
        opened(three[0], three[1], temperature=2).fingerprint,
        opened(three[0], three[1], weights=[1, 2]).fingerprint,
    ]
    assert len(set(fingerprints)) == len(fingerprints)
    assert opened(three[0], seed=5).fingerprint == fingerprints[0]
    assert opened(three[0], three[1], weights=[2, 4]).fingerprint == fingerprints[-1]


def test_documents_kept_apart_are_numbered_and_not_each_others_targets(tmp_path):
    folder = dataset(tmp_path / "dataset", [numbered(40), numbered(50) + 100], vocab=2**32, documents=4)
    data = opened(folder, sequence=12, document_masking=True)
    batch = data.read_training(0, data.num_train_samples)
    assert batch["documents"].dtype == np.int32
    for tokens, targets, documents in zip(batch["tokens"], batch["targets"], batch["documents"], strict=True):
        size, base = (40, 0) if tokens[0] < 100 else (50, 100)
        edges = np.cumsum([len(part) for part in np.array_split(np.arange(size), 4)])
        document = np.searchsorted(edges, np.append(tokens, tokens[-1] + 1) - base, side="right")
        assert np.array_equal(documents, document[:-1] - document[0])
        assert np.array_equal(targets, np.where(document[1:] == document[:-1], tokens + 1, IGNORE_INDEX))


def test_joined_documents_have_targets_everywhere(tmp_path):
    folder = dataset(tmp_path / "dataset", [numbered(40)], vocab=2**32, documents=4)
    batch = opened(folder, sequence=12).read_training(0, 3)
    assert "documents" not in batch
    assert (batch["targets"] != IGNORE_INDEX).all()


def test_facts_say_what_a_model_must_know(folder):
    facts = opened(folder, sequence=10).info
    assert (facts.kind, facts.vocab_size, facts.seq_len, facts.num_classes, facts.image_shape) == (
        "tokens",
        2**32,
        10,
        None,
        None,
    )


def flip(folder, byte):
    """Change a byte of the first shard under a reader that has it mapped."""
    with open(folder / "shard-00000.bin", "r+b") as file:
        file.seek(byte)
        value = file.read(1)
        file.seek(byte)
        file.write(bytes([value[0] ^ 1]))


def test_damage_after_a_block_was_read_is_found_in_the_next_epoch(tmp_path):
    folder = dataset(tmp_path / "dataset", [numbered(100_000)], vocab=2**32)
    data = opened(folder, sequence=100)
    data.read_training(0, data.num_train_samples)
    flip(folder, 3 * 65536 + 5)
    with pytest.raises(DataError, match=r"shard-00000\.bin block 3 .* the checksum differs"):
        data.read_training(data.num_train_samples, data.num_train_samples)


@pytest.mark.parametrize("own", [True, False])
def test_damage_of_held_out_samples_is_found_in_the_next_evaluation(tmp_path, own):
    folder = dataset(tmp_path / "dataset", [numbered(100_000)], vocab=2**32)
    evaluate = {"source": {"prepared": str(folder)}} if own else {"holdout_fraction": 0.3}
    data = opened(folder, sequence=100, evaluation=evaluate)
    half = data.num_validation_samples // 2
    for start in (0, half):
        data.read_validation(start, half)
    flip(folder, 3 * 65536 + 5)
    with pytest.raises(DataError, match=r"block 3 .* the checksum differs"):
        [data.read_validation(start, half) for start in (0, half)]


def test_each_block_is_hashed_once_in_an_epoch(tmp_path, monkeypatch):
    folder = dataset(tmp_path / "dataset", [numbered(100_000)], vocab=2**32)
    hashed = []
    monkeypatch.setattr(shard.MappedShard, "_verify_block", lambda self, block: hashed.append(block))
    data = opened(folder, sequence=100, share=0.2)
    for first in range(0, 3 * data.num_train_samples, 10):
        data.read_training(first, 10)
        data.read_validation(0, 1)
    assert len(hashed) <= 3 * 7 + 300  # an evaluation of one sample touches one block, or two
    assert sorted(set(hashed)) == list(range(7))
