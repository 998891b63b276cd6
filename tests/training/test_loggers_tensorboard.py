"""medconv/training/loggers.py: curves without one of the epoch, text as it is."""

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from medconv.training.loggers import TensorBoard


def test_there_is_no_curve_of_the_epoch(tmp_path):
    board = TensorBoard(tmp_path, name=None, version="tensorboard")
    board.log_metrics({"epoch": 0, "train/loss": 0.5}, 7)
    board.log_metrics({"epoch": 1}, 8)
    board.finalize("success")
    events = EventAccumulator(board.log_dir).Reload()
    assert events.Tags()["scalars"] == ["train/loss"]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(7, 0.5)]


def test_text_is_a_block_of_code(tmp_path):
    board = TensorBoard(tmp_path, name=None, version="tensorboard")
    board.log_text("config", "seed: 0\nrun:\n  name: '*a*'\n")
    board.finalize("success")
    (text,) = (
        EventAccumulator(board.log_dir).Reload().Tensors("config/text_summary")[0].tensor_proto.string_val
    )
    assert text.decode() == "    seed: 0\n    run:\n      name: '*a*'\n"
