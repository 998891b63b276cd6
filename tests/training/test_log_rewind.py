"""medconv/training/log_files.py: metrics.csv and TensorBoard's files are cut back to a checkpoint."""

from medconv.training import log_files


def test_logs_are_cut_back_to_their_measured_sizes(tmp_path):
    events = tmp_path / "tensorboard/events.out.tfevents.1"
    events.parent.mkdir()
    events.write_bytes(b"12345")
    # of another run, whose folder is inside this one
    other = tmp_path / "longer/tensorboard/events.out.tfevents.3"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"123")
    (tmp_path / "metrics.csv").write_text("step,loss\n0,1.0\n1,2.0\n")
    measured = log_files.measure_logs(tmp_path)
    events.write_bytes(b"12345678")
    other.write_bytes(b"123456")
    (events.parent / "events.out.tfevents.2").write_bytes(b"1")
    (events.parent / "hparams.yaml").touch()
    (tmp_path / "metrics.csv").write_text("step,loss,dice\n0,1.0,\n1,2.0,\n2,3.0,0.5\n3,0.")
    log_files.rewind_logs(tmp_path, measured)
    assert events.read_bytes() == b"12345"
    assert (tmp_path / "metrics.csv").read_text() == "step,loss,dice\n0,1.0,\n1,2.0,\n"
    assert sorted(path.name for path in events.parent.iterdir()) == [events.name, "hparams.yaml"]
    log_files.rewind_logs(tmp_path, {})
    assert not events.exists() and not (tmp_path / "metrics.csv").exists()
    assert other.read_bytes() == b"123456"
