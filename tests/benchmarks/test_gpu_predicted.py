"""A GPU's decoding iterations as its profile and its data sheet predict them, beside measured ones."""

from benchmarks.gpu.predicted import MEASURED_S, predictions


def test_the_profile_of_an_h100_predicts_its_iterations():
    """The profile has the parts of a layer alone; iterations were measured whole, by another program."""
    errors = {row.batch: row.error for row in predictions() if row.source == "profile"}
    assert errors.keys() == MEASURED_S.keys()
    assert all(abs(error) < 0.06 for error in errors.values()) and abs(errors[64]) < 0.02


def test_the_data_sheet_of_an_h100_comes_close():
    errors = [row.error for row in predictions() if row.source == "roofline, engine none"]
    assert len(errors) == 3 and all(abs(error) < 0.14 for error in errors)
