package copilot

import (
	"os"
	"strings"
	"testing"
)

// TestMain makes the test binary play the CLI where a test has started it as a child.
func TestMain(m *testing.M) {
	switch mode, script, _ := strings.Cut(os.Getenv("COPILOT_TEST_CHILD"), ":"); mode {
	case "spine":
		os.Exit(spineChild(script))
	default:
		os.Exit(m.Run())
	}
}
