"""Pictures of runs: one page that opens anywhere, also of runs that are damaged."""

from jtrain.inspect.report.page import page as page
from jtrain.inspect.report.read_run import RunStory as RunStory
from jtrain.inspect.report.read_run import read as read
