"""The options of the commands, as frozen dataclasses: Typer's parameters are made from their fields.

A record that only its command reads is in the command's file in `exegpt/cli`.
"""
