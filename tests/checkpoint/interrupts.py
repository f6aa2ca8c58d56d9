"""A Ctrl-C at each possible moment of a function."""

import dis
import sys


def interrupted(function, moment: int, kept: list[KeyboardInterrupt]) -> bool:
    """Return whether a KeyboardInterrupt came, at the n-th point where Python checks for signals.

    That is after a call, at a function's beginning and where a loop turns back.
    """
    left, last, came = moment, {}, False

    def trace(frame, event, _):
        nonlocal left, came
        frame.f_trace_opcodes = "jtrain" in frame.f_code.co_filename
        if event == "call":
            last[id(frame)] = ""
        elif event == "opcode":
            done = last.get(id(frame), "")
            last[id(frame)] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            left -= done.startswith(("CALL", "RESUME", "JUMP_BACKWARD"))
            if left < 0 and not came:
                came = True
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt as error:
        kept.append(error)
    finally:
        sys.settrace(before)
    return came
