"""Input and output: axial reads and writes all files through these modules.

read.py      reads JSON, YAML, CSV and text files into checked values, or raises one InputError
images.py    reads photos and label images
schemas.py   schemas of the files: fields, types and ranges
check.py     checks arguments of configuration: types and ranges
gfile.py     files and folders on this machine and in buckets
show.py      shows untrusted text on terminals and in pictures, pages, Markdown and CSV
write.py     checks output paths before the work begins, and writes files atomically
lock.py      allows one writer per folder
"""
