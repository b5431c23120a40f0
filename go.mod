module copilot

go 1.23
