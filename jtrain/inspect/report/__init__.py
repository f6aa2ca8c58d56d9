"""Reports of runs: one self-contained HTML page, also for damaged runs."""

from jtrain.inspect.report.page import render_page as render_page
from jtrain.inspect.report.read_run import RunStory as RunStory
from jtrain.inspect.report.read_run import read_run as read_run
