"""TFRecord files and the Examples in them, against Grain's reader and protobuf's writer."""

from pathlib import Path

import grain
import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from image_files import framed, write_records

from jtrain.data import GrainRows, Shuffled
from jtrain.data.sources.example import read_example
from jtrain.data.sources.tfrecord import TFRecords
from jtrain.errors import DataError

RECORDS = [bytes(np.random.default_rng(size).bytes(size)) for size in (5, 0, 300, 1, 70)]


def example_type():
    """Build the class tf.train.Example from its published description."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", syntax="proto3", package="tf")
    field = descriptor_pb2.FieldDescriptorProto
    lists = (("Bytes", field.TYPE_BYTES), ("Float", field.TYPE_FLOAT), ("Int64", field.TYPE_INT64))

    def add(message, name, number, kind, *, of="", many=False):
        label = field.LABEL_REPEATED if many else field.LABEL_OPTIONAL
        message.field.add(name=name, number=number, type=kind, label=label, type_name=of or None)

    for name, kind in lists:
        add(file.message_type.add(name=f"{name}List"), "value", 1, kind, many=True)
    feature = file.message_type.add(name="Feature")
    for number, (name, _) in enumerate(lists, 1):
        of = f".tf.{name}List"
        add(feature, f"{name.lower()}_list", number, field.TYPE_MESSAGE, of=of)
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    add(entry, "key", 1, field.TYPE_STRING)
    add(entry, "value", 2, field.TYPE_MESSAGE, of=".tf.Feature")
    of = ".tf.Features.FeatureEntry"
    add(features, "feature", 1, field.TYPE_MESSAGE, of=of, many=True)
    add(file.message_type.add(name="Example"), "features", 1, field.TYPE_MESSAGE, of=".tf.Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tf.Example"))


Example = example_type()


def example(**features) -> bytes:
    made = Example()
    for name, values in features.items():
        feature = made.features.feature[name]
        if isinstance(values[0], bytes):
            feature.bytes_list.value.extend(values)
        elif isinstance(values[0], float):
            feature.float_list.value.extend(values)
        else:
            feature.int64_list.value.extend(values)
    return made.SerializeToString()


def test_records_by_index_are_those_that_grain_streams(tmp_path: Path):
    path = write_records(tmp_path / "one.tfrecord", RECORDS)
    records = TFRecords(path)
    assert [records[i] for i in range(len(records))] == RECORDS
    assert list(grain.experimental.TFRecordIterDataset(str(path))) == RECORDS


def test_several_files_are_one_after_the_other(tmp_path: Path):
    write_records(tmp_path / "b.tfrecord", RECORDS[2:])
    write_records(tmp_path / "a.tfrecord", RECORDS[:2])
    (tmp_path / "c.tfrecord").touch()
    records = TFRecords(str(tmp_path / "*.tfrecord"))
    assert [records[i] for i in (4, 0, 1, 2, 3)] == [RECORDS[i] for i in (4, 0, 1, 2, 3)]
    with pytest.raises(IndexError, match="5 was requested of 5"):
        records[5]


def test_batches_are_functions_of_the_step(tmp_path: Path):
    made = [example(x=[float(i), 0.5], label=[i % 3]) for i in range(20)]
    records = TFRecords(write_records(tmp_path / "a.tfrecord", made))
    rows = grain.MapDataset.source(records).map(read_example)
    batches = Shuffled(GrainRows(rows), size=5, seed=1)
    assert sorted(x for step in range(4) for x in batches[step]["x"][:, 0]) == list(range(20))
    np.testing.assert_array_equal(batches[2]["label"], batches[2]["label"])
    np.testing.assert_array_equal(batches[2]["label"][:, 0], batches[2]["x"][:, 0] % 3)


def test_features_are_those_that_protobuf_wrote():
    got = read_example(
        example(
            image=[b"\x89PNG", b""],
            box=[0.25, -1.5e30, float("inf")],
            label=[0, 1, 127, 128, -1, 2**63 - 1, -(2**63)],
            **{"caf\u00e9": [7]},
        )
    )
    assert got["image"] == [b"\x89PNG", b""]
    np.testing.assert_array_equal(
        got["box"], np.array([0.25, -1.5e30, np.inf], np.float32), strict=True
    )
    assert got["label"].tolist() == [0, 1, 127, 128, -1, 2**63 - 1, -(2**63)]
    assert got["caf\u00e9"].tolist() == [7]


def test_whole_numbers_of_any_length_come_back():
    rng = np.random.default_rng(0)
    numbers = (rng.integers(-(2**62), 2**62, 500) >> rng.integers(0, 62, 500)).tolist()
    assert read_example(example(n=numbers))["n"].tolist() == numbers


def test_a_feature_without_values_is_empty():
    made = Example()
    made.features.feature["none"].SetInParent()
    made.features.feature["floats"].float_list.SetInParent()
    got = read_example(made.SerializeToString())
    assert len(got["none"]) == len(got["floats"]) == 0
    assert read_example(b"") == {}


@pytest.mark.parametrize("kept", range(1, 400, 7))
def test_a_file_that_is_cut_off_anywhere_is_refused_and_the_advice_works(kept, tmp_path: Path):
    path = write_records(tmp_path / "a.tfrecord", RECORDS)
    data = path.read_bytes()
    ends = np.cumsum([len(framed(record)) for record in RECORDS]).tolist()
    assert kept < len(data) == 456 > 400
    path.write_bytes(data[:kept])
    if kept in ends:
        assert len(TFRecords(path)) == ends.index(kept) + 1
        return
    with pytest.raises(DataError, match=rf"is cut off at byte {kept}\. .*truncate -s") as caught:
        TFRecords(path)
    path.write_bytes(data[: int(str(caught.value).split("truncate -s ")[1].split()[0])])
    whole = sum(end <= kept for end in ends)
    if whole:
        assert len(TFRecords(path)) == whole


def test_a_damaged_length_is_reported_by_record_and_byte(tmp_path: Path):
    path = write_records(tmp_path / "a.tfrecord", RECORDS)
    data = bytearray(path.read_bytes())
    data[21 + 16 + 1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"record 2, at byte 37, .* checksum"):
        TFRecords(path)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\x1f\x8b\x08 packed", r"packed by gzip, at byte 0.*gunzip -k"),
        (b"\x89PNG\r\n\x1a\n" * 9, r"record 0, at byte 0, .* checksum"),
        (b"", r"holds no record"),
    ],
    ids=["packed", "foreign", "empty"],
)
def test_another_file_is_refused(data: bytes, says: str, tmp_path: Path):
    (tmp_path / "a.tfrecord").write_bytes(data)
    with pytest.raises(DataError, match=says):
        TFRecords(tmp_path / "a.tfrecord")


@pytest.mark.parametrize("record", [b"\x89PNG\r\n", b"\x0a\x05ab", b"\x0a\x04\x0a\x02\x12\x80"])
def test_a_record_that_is_no_example_is_reported(record: bytes):
    begins = record[:4].hex(" ")
    with pytest.raises(DataError, match=rf"{len(record)} bytes .*{begins}.*frombuffer"):
        read_example(record)
