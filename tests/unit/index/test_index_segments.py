import os
import re

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phasemesh.index import segment_file
from phasemesh.index.segment_file import SegmentDamaged, open_segment, write_segment
from phasemesh.index.segments import FORMAT_VERSION, SegmentKey, build_segment
from phasemesh.index.spec import Codec
from tests.unit.index.corpora import corpora, random_corpus

KEY = SegmentKey("0" * 32, "file.lance", None)


def arrays_of(segment):
    codes = {
        "codes": segment.codes.data,
        "code_scales": segment.codes.scales,
        "code_errors": segment.codes.errors,
    }
    names = ("tokens", "range_offsets", "row_ranges", "norms", "id_offsets", "ids")
    return {name: getattr(segment, name) for name in names} | codes


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(corpora, st.sampled_from([None, *Codec]))
def test_a_file_gives_back_what_was_written(tmp_path, corpus, codec):
    written = corpus.segment(codec=codec)
    read = open_segment(write_segment(written, tmp_path), written.key)
    for name, before in arrays_of(written).items():
        after = arrays_of(read)[name]
        assert (after.dtype, after.shape) == (before.dtype, before.shape)
        assert after.tobytes() == before.tobytes()
    assert [read.row_id(row) for row in range(read.rows)] == corpus.ids
    for row, document in enumerate(corpus.documents):
        assert read.row_tokens(row).tobytes() == document.tobytes()
        assert read.norms[row] >= max((np.linalg.norm(v.astype(float)) for v in document), default=0.0)
    assert read.row_lengths.tolist() == [len(document) for document in corpus.documents]


@pytest.mark.parametrize("dim", [7, 48])
def test_the_reference_reader_of_safetensors_opens_it(tmp_path, dim):
    corpus = random_corpus(1, 30, dim=dim)
    segment = corpus.segment()
    path = write_segment(segment, tmp_path)
    tensors = safetensors.numpy.load_file(path)
    for name, array in arrays_of(segment).items():
        assert tensors[name].tobytes() == array.tobytes()
    with safetensors.safe_open(path, "numpy") as file:
        metadata = file.metadata()
    assert metadata["data_key"] == "file.lance"
    assert len(metadata["sha256"]) == 64


@pytest.mark.parametrize("dim", [7, 48])
def test_what_is_scanned_is_a_view_of_the_map_on_a_cache_line(tmp_path, dim):
    segment = random_corpus(2, 30, dim=dim).segment()
    read = open_segment(write_segment(segment, tmp_path), segment.key)
    scanned = owner = read.tokens if read.key.codec is None else read.codes.data
    while isinstance(owner, np.ndarray):
        assert not owner.flags.owndata
        owner = owner.base
    assert not scanned.flags.writeable
    assert scanned.ctypes.data % 64 == 0


def test_chunks_of_a_document_become_ranges():
    tokens = np.arange(12, dtype=np.float16).reshape(6, 2)
    chunks = [np.array([1, 3], np.int32), np.zeros(0, np.int32), np.zeros(0, np.int32)]
    segment = build_segment(KEY, ["a", "b", "c"], tokens, np.array([0, 4, 4, 6]), chunks)
    assert segment.range_offsets.tolist() == [0, 1, 3, 4, 4, 6]
    assert segment.row_ranges.tolist() == [0, 3, 4, 5]
    assert segment.range_to_row.tolist() == [0, 0, 0, 1, 2]


def test_every_flipped_byte_and_every_truncation_is_noticed(tmp_path):
    segment = random_corpus(3, 3, dim=16, longest=2).segment(codec=Codec.INT4)
    path = write_segment(segment, tmp_path)
    whole = path.read_bytes()
    header_end = 8 + int.from_bytes(whole[:8], "little")
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        # White space that pads the header carries nothing.
        if position < header_end and whole[position] == 0x20 and not whole[position:header_end].strip():
            continue
        with pytest.raises(SegmentDamaged):
            open_segment(path, segment.key)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(SegmentDamaged):
            open_segment(path, segment.key)
    path.write_bytes(whole + b"\0")
    with pytest.raises(SegmentDamaged):
        open_segment(path, segment.key)


def test_a_header_that_tells_another_shape_is_noticed(tmp_path):
    segment = random_corpus(3, 4, dim=16, longest=3).segment(codec=None)
    path = write_segment(segment, tmp_path)
    whole = path.read_bytes()
    tokens = len(segment.tokens)
    # As many bytes, and offsets that fit: only the checksum can tell.
    told = f"[{tokens}, 16]".encode()
    other = f"[{tokens * 2}, 8]".encode().ljust(len(told))
    assert whole.count(told) == 1
    path.write_bytes(whole.replace(told, other))
    with pytest.raises(SegmentDamaged, match="checksum"):
        open_segment(path, segment.key)


@pytest.mark.parametrize(
    "other",
    [
        SegmentKey("1" * 32, "file.lance", None),
        SegmentKey("0" * 32, "else.lance", None),
        SegmentKey("0" * 32, "file.lance", Codec.BF16),
        SegmentKey("0" * 32, "file.lance", None, FORMAT_VERSION + 1),
    ],
)
def test_a_file_of_another_key_is_not_opened(tmp_path, other):
    path = write_segment(random_corpus(4, 3).segment(), tmp_path)
    assert other.file_name != KEY.file_name
    with pytest.raises(SegmentDamaged, match="was made for"):
        open_segment(path, other)


def test_a_file_is_synced_before_it_gets_its_name_and_its_folder_after(tmp_path, monkeypatch):
    events = []
    replace = os.replace
    monkeypatch.setattr(segment_file, "sync_path", lambda path: events.append(("sync", path)))

    def renamed(source, target):
        events.append(("rename", target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", renamed)
    path = write_segment(random_corpus(4, 3).segment(), tmp_path)
    (_, temporary), *rest = events
    assert temporary.suffix == ".tmp"
    assert rest == [("rename", path), ("sync", tmp_path)]


def test_a_failed_write_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(segment_file, "sync_path", full)
    with pytest.raises(OSError, match="No space"):
        write_segment(random_corpus(4, 3).segment(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_rows_that_do_not_fit_together_are_refused():
    tokens = np.ones((4, 2), np.float16)
    with pytest.raises(ValueError, match=r"^row_offsets"):
        build_segment(KEY, ["a"], tokens, np.array([0, 3]))
    with pytest.raises(ValueError, match=r"^row_offsets"):
        build_segment(KEY, ["a", "b"], tokens, np.array([0, 4]))
    with pytest.raises(ValueError, match=r"^tokens"):
        build_segment(KEY, ["a"], tokens.astype(np.float32), np.array([0, 4]))
    for cuts in ([5], [3, 1], [-1]):
        with pytest.raises(ValueError, match=r"^chunk_offsets: document 'a'"):
            build_segment(KEY, ["a"], tokens, np.array([0, 4]), [np.array(cuts)])
    tokens[2, 0] = np.nan
    with pytest.raises(ValueError, match=r"document 'b'"):
        build_segment(KEY, ["a", "b", "c"], tokens, np.array([0, 2, 3, 4]))


def test_vectors_beside_codes_are_not_kept_in_memory(tmp_path):
    corpus = random_corpus(5, 3000, dim=128, longest=30)
    segment = corpus.segment()
    if segment.key.codec is None:
        pytest.skip("the compiled kernels aren't installed")
    tokens = len(segment.tokens)
    read = open_segment(write_segment(segment, tmp_path), segment.key)
    assert segment.resident_bytes == segment.nbytes
    assert read.resident_bytes == read.nbytes - 256 * tokens

    def kilobytes_in_memory():
        # One entry per advice: the kernel splits the map.
        with open("/proc/self/smaps") as file:
            entries = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", file.read())
        mine = [entry for entry in entries if segment.key.file_name in entry]
        return sum(int(re.search(r"^Rss:\s+(\d+)", entry, re.MULTILINE)[1]) for entry in mine)

    # The codes, and at most a page or two of the vectors.
    assert kilobytes_in_memory() <= read.resident_bytes / 1024 + 64
    assert read.tokens.tobytes() == segment.tokens.tobytes()
    assert kilobytes_in_memory() >= read.nbytes / 1024 - 64
