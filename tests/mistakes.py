"""Mistakes of users."""


def assert_mistake(main, words, message, capsys):
    """A command ends with status 2, one line on stderr that has the message, and nothing else."""
    assert main([*map(str, words)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1), (out, err)
    assert err.startswith("error: ")
    assert message in err, err
