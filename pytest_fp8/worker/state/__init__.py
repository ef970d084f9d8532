"""What a training keeps: weights by plain names, optimizer, all else; and the files that hold it."""
