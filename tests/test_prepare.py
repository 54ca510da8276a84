"""`megatron-aro prepare-data`: every kind of input, tokenizers, hold-out, resumption, manifest."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_aro.cli import documents, prepare, vocabularies
from megatron_aro.cli.prepare import Settings

TEXTS = [f"Document {i}: größer, 数, {'x' * i}." for i in range(60)]
LINES = "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(TEXTS))
BYTES = Settings("bytes", None, "text", 0.2)


def all_of(path: Path, key: str = "text") -> list[str]:
    file = documents.HashedFile(path, lambda number: None)
    found = [text.decode() for text in documents.read(path, key, file)]
    assert file.sha256() == hashlib.sha256(path.read_bytes()).hexdigest()
    return found


# Inputs


@pytest.mark.parametrize("ending", ["", ".gz", ".bz2", ".xz"])
def test_packed_or_not(tmp_path: Path, ending: str) -> None:
    """JSONL has a document a line, another file is one; the hash is of the packed file."""
    pack = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}[ending]
    lines, text = tmp_path / f"a.jsonl{ending}", tmp_path / f"b.md{ending}"
    lines.write_bytes(pack((LINES + "\n").encode()))
    text.write_bytes(pack(LINES.encode()))
    assert all_of(lines) == TEXTS
    assert all_of(text) == [LINES]
    assert documents.find([tmp_path]) == [lines, text]


def test_zstandard(tmp_path: Path) -> None:
    """Several frames, as SlimPajama's files have."""
    zstandard = pytest.importorskip("zstandard")
    path = tmp_path / "a.jsonl.zst"
    half = len(LINES.encode()) // 2
    compress = zstandard.ZstdCompressor().compress
    path.write_bytes(compress(LINES.encode()[:half]) + compress(LINES.encode()[half:]))
    assert all_of(path) == TEXTS


def test_parquet(tmp_path: Path) -> None:
    """A row a document, as in FineWeb's files."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"id": list(range(60)), "content": TEXTS}), path)
    assert all_of(path, "content") == TEXTS
    with pytest.raises(ValueError, match="no column 'text', but id, content: give --key"):
        all_of(path)


def test_what_cannot_be_read_names_file_and_line(tmp_path: Path, monkeypatch) -> None:
    """Bad JSON, no such key, a damaged archive, a missing package, nothing there."""
    path = tmp_path / "a.jsonl"
    for text, message in {
        LINES + "{": r"a\.jsonl, line 61: not JSON",
        '{"body": "x"}': r"line 1: there is no text 'text', but body: give --key",
        "[1]": r"line 1: there is no text 'text', but no object",
    }.items():
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            all_of(path)
    cut = tmp_path / "b.txt.gz"
    cut.write_bytes(gzip.compress(LINES.encode())[:-20])
    with pytest.raises(ValueError, match=r"b\.txt\.gz cannot be read"):
        all_of(cut)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    packed = tmp_path / "c.jsonl.zst"
    packed.write_bytes(b"x")
    with pytest.raises(ValueError, match=r"c\.jsonl\.zst needs the package zstandard"):
        all_of(packed)
    with pytest.raises(ValueError, match="no files with names that end in .csv"):
        documents.find([tmp_path], ".csv")


def test_small_files_share_a_part() -> None:
    """64 MiB of them together; a file of many documents is a part of its own."""

    class File:
        def __init__(self, name: str, mib: int) -> None:
            self.name, self.st_size = name, mib << 20

        def stat(self) -> File:
            return self

    sizes = [("a.txt", 30), ("b.txt", 30), ("c.txt", 30), ("d.jsonl", 1), ("e.txt", 1)]
    parts = prepare._parts([File(*size) for size in sizes])  # type: ignore[misc]
    assert [[file.name[0] for file in part] for part in parts] == [["a", "b"], ["c"], ["d"], ["e"]]


# Tokenizers


def test_bytes_and_what_is_no_tokenizer(tmp_path: Path) -> None:
    """The flags are those of the quickstart's corpus; mistakes are one sentence."""
    vocabulary = vocabularies.load("bytes")
    assert list(vocabulary.encode("é".encode())) == [0xC3, 0xA9]
    assert vocabulary.flags == "--tokenizer-type NullTokenizer --vocab-size 257"
    with pytest.raises(ValueError, match="There is no tokenizer gpt2: give bytes, a file"):
        vocabularies.load("gpt2")
    with pytest.raises(ValueError, match="has no tokenizer.json"):
        vocabularies.load(str(tmp_path))
    with pytest.raises(ValueError, match="--eod is for a HuggingFace folder"):
        vocabularies.load("bytes", "<eod>")
    (tmp_path / "x.tiktoken").write_text("no ranks\n")
    with pytest.raises(ValueError, match="does not hold tiktoken's ranks"):
        vocabularies.load(str(tmp_path / "x.tiktoken"))


def test_tiktoken_ranks(tmp_path: Path) -> None:
    """All bytes and one merge; <|endoftext|> in a text is text."""
    import base64

    pytest.importorskip("tiktoken")
    ranks = [bytes([i]) for i in range(256)] + [b"ab"]
    lines = [f"{base64.b64encode(token).decode()} {i}" for i, token in enumerate(ranks)]
    (tmp_path / "q.tiktoken").write_text("\n".join(lines) + "\n")
    vocabulary = vocabularies.load(str(tmp_path / "q.tiktoken"))
    assert (vocabulary.size, vocabulary.eod) == (258, 257)
    assert list(vocabulary.encode(b"abc")) == [256, 99]
    assert vocabulary.eod not in vocabulary.encode(b"<|endoftext|>")


def test_a_huggingface_folder(tmp_path: Path) -> None:
    """The end of document by tokenizer_config.json, or as given; its id need not be the last."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<end>": 0, "two": 1, "words": 2, "<unk>": 3}
    model = tokenizers.models.WordLevel(words, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="does not say which token ends a document: give --eod"):
        vocabularies.load(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')
    vocabulary = vocabularies.load(str(tmp_path))
    assert list(vocabulary.encode(b"two words more")) == [1, 2, 3]
    assert vocabulary.flags.endswith("--vocab-size 4 --null-tokenizer-eod-id 0")
    assert vocabularies.load(str(tmp_path), "two").eod == 1
    with pytest.raises(ValueError, match="has no token <eod>"):
        vocabularies.load(str(tmp_path), "<eod>")


# The whole


def written(prefix: Path) -> list[bytes]:
    """The documents of a .bin file, each checked to end with the end of document, without it."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    assert len(dataset) == len(dataset.document_indices) - 1
    ids = [dataset[i].tolist() for i in range(len(dataset))]
    assert all(document[-1] == 256 and 256 not in document[:-1] for document in ids)
    return [bytes(document[:-1]) for document in ids]


def test_documents_are_written_once_and_held_out_by_their_hash(tmp_path: Path) -> None:
    """Through the command; copies fall on one side; the manifest's counts and hashes are true."""
    source, out = tmp_path / "in", tmp_path / "out"
    (source / "deep").mkdir(parents=True)
    (source / "a.jsonl.gz").write_bytes(gzip.compress((LINES + '{"text": " "}\n').encode()))
    (source / "deep" / "b.jsonl").write_text(LINES)
    command = [sys.executable, "-W", "ignore", "-m", "megatron_aro.cli.main", "prepare-data"]
    command += [str(source), "--out", str(out), "--tokenizer", "bytes", "--held-out", "0.2"]
    done = subprocess.run([*command, "--workers", "2"], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert f"--vocab-size 257 --train-data-path {out}/train --valid" in done.stdout
    assert "100%" in done.stderr
    train, valid = written(out / "train"), written(out / "valid")
    assert sorted(train + valid) == sorted(2 * [text.encode() for text in TEXTS])
    assert valid and not set(train) & set(valid)
    assert train[: len(train) // 2] == train[len(train) // 2 :]  # in the order of the inputs
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["splits"]["train"]["tokens"] == sum(len(text) + 1 for text in train)
    digest = hashlib.sha256((out / "valid.bin").read_bytes()).hexdigest()
    assert manifest["splits"]["valid"]["bin_sha256"] == digest
    assert [facts["empty"] for facts in manifest["inputs"]] == [1, 0]
    assert not (out / "parts").exists()
    again = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert "kept" in again.stdout and again.returncode == 0


def test_it_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bad file ends it; mended, only its part is done again, to the same result as at once."""
    good, bad = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    good.write_text(LINES)
    bad.write_text(LINES + "{\n")
    with pytest.raises(ValueError, match=r"b\.jsonl, line 61: not JSON"):
        prepare.prepare([good, bad], tmp_path / "out", BYTES, 1)
    assert not (tmp_path / "out" / "manifest.json").exists()
    bad.write_text(LINES)
    resumed = prepare.prepare([good, bad], tmp_path / "out", BYTES, 1)
    assert "1 of 2 parts were ready before." in capsys.readouterr().out
    at_once = prepare.prepare([good, bad], tmp_path / "other", BYTES, 2)
    assert resumed["splits"] == at_once["splits"]
    with pytest.raises(ValueError, match="No document fell into the valid split"):
        prepare.prepare([good], tmp_path / "none", BYTES._replace(held_out=1e-9), 1)
    alone = prepare.prepare([good, bad], tmp_path / "out", BYTES._replace(held_out=0.0), 1)
    assert alone["splits"].keys() == {"train"} and not (tmp_path / "out" / "valid.bin").exists()
