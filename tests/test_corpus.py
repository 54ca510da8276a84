"""Files become a byte-level corpus that Megatron reads back byte for byte."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_aro.cli import corpus

ALL_BYTES = bytes(range(256))


@pytest.fixture
def folder(tmp_path):
    """40 small files in two folders, one of all byte values, one empty, one of another suffix."""
    for i in range(40):
        path = tmp_path / "source" / ("a" if i % 2 else "b") / f"file{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"text number {i}\n".encode() * (i + 1))
    (tmp_path / "source" / "a" / "all.py").write_bytes(ALL_BYTES)
    (tmp_path / "source" / "empty.py").touch()
    (tmp_path / "source" / "other.txt").write_text("no Python")
    return tmp_path


def documents(prefix) -> list[bytes]:
    """The documents of a corpus, each of which must end with the end-of-document id."""
    dataset = IndexedDataset(str(prefix))
    assert len(dataset.document_indices) == len(dataset) + 1  # one sequence a document
    for tokens in dataset:
        assert tokens[-1] == corpus.EOD and (tokens[:-1] < 256).all()
    return [tokens[:-1].astype(np.uint8).tobytes() for tokens in dataset]


def test_bytes_come_back_and_held_out_files_are_whole_and_apart(folder):
    files = corpus.collect([folder / "source"], ".py")
    facts = corpus.build(files, folder / "out", held_out=0.25)
    for split, held_out in (("train", False), ("valid", True)):
        paths = [path for name, path in files.items() if corpus.is_held_out(name, 0.25) == held_out]
        read = documents(folder / "out" / split)
        assert read == [path.read_bytes() for path in paths]
        assert facts[f"{split}_files"] == len(read)
        assert facts[f"{split}_tokens"] == sum(len(text) + 1 for text in read)
    assert ALL_BYTES in documents(folder / "out" / "train") + documents(folder / "out" / "valid")
    assert facts["train_files"] + facts["valid_files"] == 41  # neither the empty nor the other one


def test_the_same_files_give_the_same_corpus(folder):
    for out in ("one", "two"):
        corpus.build(corpus.collect([folder / "source"], ".py"), folder / out, 0.25)
    for name in ("train.bin", "train.idx", "valid.bin", "valid.idx", "corpus.json"):
        assert (folder / "one" / name).read_bytes() == (folder / "two" / name).read_bytes()


def test_a_corpus_is_rebuilt_only_when_a_byte_changed_or_it_is_incomplete(folder):
    def build():
        corpus.build(corpus.collect([folder / "source"], ".py"), folder / "out", 0.25)
        return (folder / "out" / "train.bin").stat().st_mtime_ns

    first = build()
    assert build() == first
    (folder / "out" / "corpus.json").unlink()  # as an interruption leaves it
    second = build()
    assert second > first
    (folder / "source" / "a" / "all.py").write_bytes(ALL_BYTES[::-1])
    assert build() > second


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(texts=st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=5))
def test_any_bytes_round_trip(tmp_path, texts):
    paths = []
    for i, text in enumerate(texts):
        paths.append(tmp_path / f"{i}")
        paths[-1].write_bytes(text)
    corpus._write(paths, tmp_path / "any")
    assert documents(tmp_path / "any") == texts


def test_held_out_share_and_stability():
    names = [f"package/module{i}.py" for i in range(5000)]
    held = {name for name in names if corpus.is_held_out(name, 0.05)}
    assert 0.035 < len(held) / len(names) < 0.065
    assert held < {name for name in names if corpus.is_held_out(name, 0.10)}


def test_the_tokenizer_flags_give_megatron_the_end_of_document_id_of_the_corpus():
    from megatron.core.tokenizers.text.libraries import NullTokenizer

    assert corpus.TOKENIZER_FLAGS[0::2] == ["--tokenizer-type", "--vocab-size"]
    assert NullTokenizer(corpus.TOKENIZER_FLAGS[-1]).eod == corpus.EOD


def test_bad_input_is_one_sentence(folder):
    with pytest.raises(ValueError, match="does not exist"):
        corpus.collect([folder / "nowhere"])
    with pytest.raises(ValueError, match="same name"):
        corpus.collect([folder / "source" / "a", folder / "source" / "a"])
    with pytest.raises(ValueError, match="None of the 1 files fell into the valid split"):
        corpus.build({"x": folder / "source" / "a" / "all.py"}, folder / "out", 0.0)
    assert not (folder / "out").exists()
    command = [sys.executable, "-m", "megatron_aro.cli.corpus", "nowhere", "--out", "out"]
    failed = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert failed.returncode == 1 and failed.stderr.strip() == "nowhere does not exist."
