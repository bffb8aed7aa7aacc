"""Tests of how messages name a setting."""

from gpipe_hpc.setting_names import setting


def test_a_setting_is_named_as_commands_and_scripts_take_it():
    assert setting("train.device", "cpu") == 'train.device=cpu, in a script device="cpu"'
