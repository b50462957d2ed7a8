"""The verbs of the command line (`workhorse VERB`), one file for each verb."""
