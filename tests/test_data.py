"""Readers of public formats: what they give, and that whatever is wrong with a file is said with its name."""

from __future__ import annotations

import numpy as np
import pytest

from experiments import data


def write_cifar(folder, num_classes: int, records: int):
    """Files of both parts with one image a record that says where its bytes lay; returns all images."""
    names = data.CIFAR10_FILES if num_classes == 10 else data.CIFAR100_FILES
    images = np.random.default_rng(0).integers(0, 256, (len(names), records, 32, 32, 3), np.uint8)
    labels = np.arange(len(names) * records).reshape(len(names), records) * 7 % num_classes
    for name, pictures, numbers in zip(names, images, labels, strict=True):
        rows = []
        for picture, number in zip(pictures, numbers, strict=True):
            head = [number] if num_classes == 10 else [99, number]
            planes = [picture[:, :, channel].tobytes() for channel in range(3)]
            rows.append(bytes(head) + b"".join(planes))
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"".join(rows))
    return images, labels


@pytest.mark.parametrize("num_classes", [10, 100])
def test_cifar_files_give_back_every_pixel_and_the_fine_label(num_classes, tmp_path):
    images, labels = write_cifar(tmp_path, num_classes, records=3)
    train, test = data.read_cifar(tmp_path, num_classes)
    for part, expected, numbers in ((train, images[:-1], labels[:-1]), (test, images[-1:], labels[-1:])):
        np.testing.assert_array_equal(part.images, np.concatenate(expected))
        np.testing.assert_array_equal(part.labels, np.concatenate(numbers))
        assert (part.images.dtype, part.labels.dtype) == (np.uint8, np.int32)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (bytes(3072), "expected records of 3073 bytes"),
        (bytes([10]) + bytes(3072), "expected labels from 0 to 9, got 10 in record 0"),
        (b"", "the file is empty"),
        (None, "found none"),
    ],
)
def test_a_cifar_file_that_is_wrong_is_named(content, said, tmp_path):
    write_cifar(tmp_path, 10, records=1)
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ValueError, match=said) as raised:
        data.read_cifar(tmp_path, 10)
    assert str(path) in str(raised.value)


def test_there_are_two_cifar_formats(tmp_path):
    with pytest.raises(ValueError, match="expected 10 or 100, got 20"):
        data.read_cifar(tmp_path, 20)


def test_tsv_columns_go_by_name_and_nothing_is_quoted(tmp_path):
    path = tmp_path / "train.tsv"
    path.write_bytes('index\tlabel\tsentence\n0\t1\t"so" good\x85\n1\t0\tcaf\xe9\n'.encode())
    sentences, labels = data.read_tsv(path)
    assert sentences == ['"so" good\x85', "caf\xe9"]
    assert labels.dtype == np.int32 and labels.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("index\tsentence\n0\tgood\n", "a column 'label' in line 1"),
        ("sentence\tlabel\ngood\t1\nbad\n", "line 3: expected 2 columns, got 1"),
        ("sentence\tlabel\ngood\t-1\n", "line 2: expected a label from 0 on, got '-1'"),
        ("sentence\tlabel\n", "expected lines after the first"),
    ],
)
def test_a_tsv_that_is_wrong_says_where(content, said, tmp_path):
    path = tmp_path / "dev.tsv"
    path.write_text(content)
    with pytest.raises(ValueError, match=said) as raised:
        data.read_tsv(path)
    assert str(path) in str(raised.value)


def test_text_is_utf_8(tmp_path):
    path = tmp_path / "train.txt"
    path.write_bytes("caf\xe9\r\n".encode())
    assert data.read_text(path) == "caf\xe9\r\n"
    path.write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(ValueError, match="expected UTF-8"):
        data.read_text(path)


def test_a_set_is_found_where_the_option_or_else_the_environment_says(tmp_path, monkeypatch):
    for root in ("option", "variable"):
        (tmp_path / root / "sst2").mkdir(parents=True)
        for name in ("train.tsv", "dev.tsv"):
            (tmp_path / root / "sst2" / name).touch()
    monkeypatch.setenv("NF_DATA", str(tmp_path / "variable"))
    assert data.find_data("sst2") == tmp_path / "variable" / "sst2"
    assert data.find_data("sst2", tmp_path / "option") == tmp_path / "option" / "sst2"
    monkeypatch.delenv("NF_DATA")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ValueError, match=str(tmp_path / ".cache" / "nf_jax_data" / "sst2")):
        data.find_data("sst2")


@pytest.mark.parametrize("name", data.SETS)
def test_what_is_missing_is_one_line_with_its_source_and_its_place(name, tmp_path):
    files = [file.replace("*", "-00001") for file in data.SETS[name].files]
    for file in files[:-1]:
        (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name / file).touch()
    with pytest.raises(ValueError) as raised:
        data.find_data(name, tmp_path)
    said = str(raised.value)
    assert "\n" not in said
    for part in (f"no {files[-1]}", str(tmp_path / name), data.SETS[name].source, "--data DIR"):
        assert part in said


def test_an_unknown_set_is_refused():
    with pytest.raises(ValueError, match=r"expected one of cifar10, .* got 'imagenet'"):
        data.find_data("imagenet")
