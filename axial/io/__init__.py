"""The two doors of the house: what comes in is read here, and what goes out is written here.

read.py      the door in: bytes, JSON, YAML and CSV become checked values, or one InputError
images.py    the door in for photos and label images
schemas.py   what the files look like: fields, types and ranges
check.py     arguments of configuration: types and ranges
gfile.py     files and folders of this machine and of buckets
show.py      text from outside on terminals, in pictures, pages, Markdown and CSV
write.py     the door out: paths that are tried before the work, files that appear whole
lock.py      one writer a folder
"""
