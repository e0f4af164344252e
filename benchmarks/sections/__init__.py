"""One file for each section: `rows(case, peers)` yields a row for each call that the case compares."""
