"""What an arm trains: model, batches, loss, optimizer and the step, on one GPU or several."""
