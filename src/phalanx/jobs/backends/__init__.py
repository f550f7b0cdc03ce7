"""The engines: each runs jobs somewhere, by the one contract of `jobs/backends/base.py`. A file or family of files for
one engine; none knows another, and what they need beyond the standard library is imported when it is used."""
