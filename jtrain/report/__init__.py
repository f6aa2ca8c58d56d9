"""Pictures of runs: one page that opens anywhere, also of runs that are damaged."""

from jtrain.report.page import page as page
from jtrain.report.reading import Story as Story
from jtrain.report.reading import read as read
