package copilot

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// fill sets everything below v to values that differ from each other and from zero, so that a field that is added later takes
// part in every test below. Secrets begin with SECRET.
func fill(v reflect.Value, path string, secret bool) {
	switch v.Type() {
	case reflect.TypeFor[json.RawMessage]():
		v.SetBytes([]byte(fmt.Sprintf(`{"raw":%q}`, path)))
		return
	case reflect.TypeFor[time.Duration]():
		v.SetInt(int64(1500 * time.Millisecond))
		return
	case reflect.TypeFor[time.Time]():
		v.Set(reflect.ValueOf(time.Date(2025, 1, 2, 3, 4, 5, 0, time.UTC)))
		return
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString(path)
		if secret {
			v.SetString("SECRET " + path)
		}
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int64:
		v.SetInt(int64(len(path)))
	case reflect.Float64:
		v.SetFloat(float64(len(path)) + 0.5)
	case reflect.Interface:
		if v.NumMethod() == 0 {
			v.Set(reflect.ValueOf(path))
		}
	case reflect.Func:
		v.Set(reflect.MakeFunc(v.Type(), func([]reflect.Value) (out []reflect.Value) {
			for i := range v.Type().NumOut() {
				out = append(out, reflect.Zero(v.Type().Out(i)))
			}
			return out
		}))
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem(), path, secret)
	case reflect.Slice:
		if v.Type().Elem().Kind() == reflect.Uint8 {
			v.SetBytes([]byte(path))
			return
		}
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0), path, secret)
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		elem := reflect.New(v.Type().Elem()).Elem()
		fill(elem, path, secret)
		v.SetMapIndex(reflect.ValueOf("k"), elem)
	case reflect.Struct:
		for i := range v.NumField() {
			f := v.Type().Field(i)
			if !f.IsExported() {
				continue // of a foreign type
			}
			fill(v.Field(i), strings.TrimPrefix(path+"."+f.Name, "."), secret || hasOption(f, "secret"))
		}
	}
	switch p := v.Addr().Interface().(type) { // what has to be valid
	case *SystemMessage:
		p.Mode, p.Sections = "customize", map[string]SystemSection{"tone": {Action: "replace", Content: path + ".Sections.Content"}}
	case *MCPServerConfig:
		p.Type, p.URL = "stdio", ""
	case *map[string]MCPServerConfig:
		s := (*p)["k"]
		s.Type, s.Command, s.URL = "http", "", path+".URL"
		(*p)["remote"] = s
	case *Tool:
		p.Name, p.Defer, p.Parameters = "tool_1", "auto", json.RawMessage(`{"type":"object","properties":{"q":{"type":"string"}}}`)
	}
}

// hasOption reports whether f's json tag has opt behind its name.
func hasOption(f reflect.StructField, opt string) bool {
	return slices.Contains(strings.Split(f.Tag.Get("json"), ",")[1:], opt)
}

func wireName(f reflect.StructField) string {
	name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
	return name
}

const testID = "11111111-2222-4333-8444-555555555555"

// fullConfig returns a configuration with every field set that kind takes. Of fields that exclude each other it has Provider,
// or with named the others.
func fullConfig(t *testing.T, kind startKind, named bool) *SessionConfig {
	t.Helper()
	var c SessionConfig
	v := reflect.ValueOf(&c).Elem()
	fill(v, "", false)
	foreign := []string{"resume", "create"}[kind]
	for i := range v.NumField() {
		if hasOption(v.Type().Field(i), foreign) {
			v.Field(i).SetZero()
		}
	}
	c.SessionID = testID
	c.EventBuffer = 7
	c.WorkingDirectory = filepath.Join(t.TempDir(), "work")
	if named {
		c.Provider, c.GitHubToken = nil, ""
	} else {
		c.Providers, c.Models, c.GitHubTokenProviderRegistrationID = nil, nil, ""
	}
	return &c
}

func mustEncode(t *testing.T, c *SessionConfig, kind startKind, o *Options) map[string]json.RawMessage {
	t.Helper()
	e, err := c.encode(kind, testID, o)
	if err != nil {
		t.Fatal(err)
	}
	return members(t, e.params)
}

func members(t *testing.T, raw json.RawMessage) map[string]json.RawMessage {
	t.Helper()
	var m map[string]json.RawMessage
	if err := json.Unmarshal(raw, &m); err != nil {
		t.Fatalf("%v in %s", err, raw)
	}
	return m
}

// golden compares raw, indented, with a file; UPDATE_GOLDEN=1 writes the file.
func golden(t *testing.T, file string, raw []byte) {
	t.Helper()
	var got bytes.Buffer
	if err := json.Indent(&got, raw, "", "\t"); err != nil {
		t.Fatalf("%v in %s", err, raw)
	}
	got.WriteByte('\n')
	path := filepath.Join("testdata", file)
	if os.Getenv("UPDATE_GOLDEN") != "" {
		if err := os.WriteFile(path, got.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	g, w := strings.Split(got.String(), "\n"), strings.Split(strings.ReplaceAll(string(want), "\r\n", "\n"), "\n")
	for i := range min(len(g), len(w)) {
		if g[i] != w[i] {
			t.Fatalf("%s:%d: got %s, want %s", file, i+1, g[i], w[i])
		}
	}
	if len(g) != len(w) {
		t.Fatalf("%s: got %d lines, want %d", file, len(g), len(w))
	}
}

// TestSessionConfigGolden pins what a configuration with every field set looks like on the wire.
func TestSessionConfigGolden(t *testing.T) {
	seen := make(map[string]bool)
	for _, tc := range []struct {
		file  string
		kind  startKind
		named bool
	}{
		{"config_create.json", startCreate, false},
		{"config_resume.json", startResume, false},
		{"config_named.json", startResume, true},
	} {
		t.Run(tc.file, func(t *testing.T) {
			c := fullConfig(t, tc.kind, tc.named)
			e, err := c.encode(tc.kind, testID, &Options{OnGitHubTelemetry: func(GitHubTelemetry) {}})
			if err != nil {
				t.Fatal(err)
			}
			dir, _ := json.Marshal(c.WorkingDirectory)
			golden(t, tc.file, bytes.Replace(e.params, dir, []byte(`"WorkingDirectory"`), 1))
			for name := range members(t, e.params) {
				seen[name] = true
			}
		})
	}

	// The protocol's members, written down apart from the struct. The trace context is added by the caller of encode.
	want := strings.Fields(`sessionId model clientName reasoningEffort reasoningSummary verbosity contextTier streaming systemMessage tools
		toolSearch availableTools excludedTools toolFilterPrecedence excludedBuiltinAgents canvases openCanvases requestCanvasRenderer
		requestExtensions extensionSdkPath extensionInfo canvasProvider commands mcpServers mcpOAuthTokenStorage authClientIdMetadataUrl
		diagnostics disabledMcpServers githubMcpToolConfig envValueMode embeddingCacheStorage skipEmbeddingRetrieval enableConfigDiscovery
		organizationCustomInstructions enableOnDemandInstructionDiscovery refreshCustomInstructions enableFileHooks enableHostGitOperations
		enableSessionStore enableSkills skillDirectories instructionDirectories pluginDirectories disabledSkills customAgents
		customAgentsLocalOnly defaultAgent agent infiniteSessions largeOutput memory provider providers models capi modelCapabilities
		enableSessionTelemetry enableCitations enableFileChangeTracking sessionLimits workingDirectory additionalDirectories configDir
		gitHubToken gitHubTokenProviderRegistrationId remoteSession cloud includeSubAgentStreamingEvents enableGitHubTelemetryForwarding
		requestPermission requestUserInput requestElicitation requestExitPlanMode requestAutoModeSwitch requestMcpApps hooks askUserVariant
		isExperimentalMode featureFlags expAssignments enableManagedSettings managedSettings disableResume continuePendingWork workflows
		requestedEnvironmentVariables skipCustomInstructions coauthorEnabled manageScheduleEnabled name sandboxConfig
		k`) // k is what fill puts into Extra
	for _, name := range want {
		if !seen[name] {
			t.Errorf("%s is never sent", name)
		}
		delete(seen, name)
	}
	if len(seen) > 0 {
		t.Errorf("sent, but not in the list: %v", seen)
	}
	var local []string
	for _, f := range reflect.VisibleFields(reflect.TypeFor[SessionConfig]()) {
		if wireName(f) == "-" {
			local = append(local, f.Name)
		}
	}
	if got, want := strings.Join(local, " "), "SessionID EventBuffer Transforms GitHubTokenProvider SessionFS OnMCPAuth OnSampling Hooks OnHook Handlers Extra"; got != want {
		t.Errorf("fields that are not sent as such: %s, want %s", got, want)
	}
}

// TestSessionConfigDefaults pins what is sent when nothing is configured, in both modes.
func TestSessionConfigDefaults(t *testing.T) {
	const flags = `"requestPermission":false,"requestUserInput":false,"requestElicitation":false,"requestExitPlanMode":false,"requestAutoModeSwitch":false`
	for _, tc := range []struct {
		name           string
		cfg            *SessionConfig
		mode           ClientMode
		params, update string
	}{
		{name: "nil",
			params: `{"sessionId":"s","envValueMode":"direct","toolFilterPrecedence":"excluded","hooks":false,"streaming":false,"includeSubAgentStreamingEvents":true,` + flags + `}`},
		{name: "own options in cli mode", cfg: &SessionConfig{CoauthorEnabled: or[bool](nil, false)},
			params: `{"sessionId":"s","envValueMode":"direct","toolFilterPrecedence":"excluded","hooks":false,"streaming":false,"includeSubAgentStreamingEvents":true,"coauthorEnabled":false,` + flags + `}`,
			update: `{"coauthorEnabled":false}`},
		{name: "empty", cfg: &SessionConfig{AvailableTools: []string{}}, mode: ModeEmpty,
			params: `{"sessionId":"s","envValueMode":"direct","toolFilterPrecedence":"excluded","hooks":false,"streaming":false,"includeSubAgentStreamingEvents":true,` +
				`"systemMessage":{"mode":"customize","sections":{"environment_context":{"action":"remove"}}},"enableOnDemandInstructionDiscovery":false,` +
				`"availableTools":[],"mcpOAuthTokenStorage":"in-memory","customAgentsLocalOnly":true,"enableSkills":false,"enableFileHooks":false,` +
				`"enableHostGitOperations":false,"memory":{"enabled":false},"enableSessionStore":false,"embeddingCacheStorage":"in-memory",` +
				`"skipEmbeddingRetrieval":true,"enableSessionTelemetry":false,"isExperimentalMode":false,` + flags + `}`,
			update: `{"skipCustomInstructions":true,"customAgentsLocalOnly":true,"coauthorEnabled":false,"manageScheduleEnabled":false,"installedPlugins":[],"includedBuiltinSkills":[]}`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			e, err := tc.cfg.encode(startCreate, "s", &Options{Mode: tc.mode})
			if err != nil {
				t.Fatal(err)
			}
			if string(e.params) != tc.params {
				t.Errorf("got  %s\nwant %s", e.params, tc.params)
			}
			if string(e.update) != tc.update {
				t.Errorf("update: got %s, want %s", e.update, tc.update)
			}
		})
	}
	if _, err := (&SessionConfig{}).encode(startCreate, "s", &Options{Mode: ModeEmpty}); !errors.Is(err, ErrInvalidConfig) {
		t.Errorf("empty mode without AvailableTools: %v", err)
	}
}

// TestEmptyModeKeepsCallersValues sets everything and finds it unchanged in empty mode.
func TestEmptyModeKeepsCallersValues(t *testing.T) {
	cli := mustEncode(t, fullConfig(t, startResume, false), startResume, nil)
	full := fullConfig(t, startResume, false)
	full.SkipCustomInstructions, full.CoauthorEnabled = new(bool), or[bool](nil, true)
	full.ManageScheduleEnabled, full.CustomAgentsLocalOnly = or[bool](nil, true), new(bool)
	e, err := full.encode(startResume, testID, &Options{Mode: ModeEmpty})
	if err != nil {
		t.Fatal(err)
	}
	for name, got := range members(t, e.params) {
		switch name {
		case "systemMessage", "workingDirectory", "skipCustomInstructions", "coauthorEnabled", "customAgentsLocalOnly", "manageScheduleEnabled":
		default:
			if string(got) != string(cli[name]) {
				t.Errorf("%s: got %s, want %s", name, got, cli[name])
			}
		}
	}
	const want = `{"skipCustomInstructions":false,"customAgentsLocalOnly":false,"coauthorEnabled":true,"manageScheduleEnabled":true,"installedPlugins":[],"includedBuiltinSkills":[]}`
	if string(e.update) != want {
		t.Errorf("update: got %s, want %s", e.update, want)
	}
}

// TestCase003CreateAndResumeAlike compares the requests of one configuration.
func TestCase003CreateAndResumeAlike(t *testing.T) {
	for _, named := range []bool{false, true} {
		c := fullConfig(t, startCreate, named)
		create := mustEncode(t, c, startCreate, nil)
		v := reflect.ValueOf(c).Elem()
		for _, f := range reflect.VisibleFields(v.Type()) {
			if hasOption(f, "create") {
				if create[wireName(f)] == nil {
					t.Errorf("%s is not in create", f.Name)
				}
				delete(create, wireName(f))
				v.FieldByIndex(f.Index).SetZero()
			}
		}
		resume := mustEncode(t, c, startResume, nil)
		for name := range resume {
			if string(resume[name]) != string(create[name]) {
				t.Errorf("%s: create %s, resume %s", name, create[name], resume[name])
			}
		}
		if len(create) != len(resume) {
			t.Errorf("create has %d members, resume %d", len(create), len(resume))
		}
	}
}

// TestOneSidedFields sets each field that one of the requests lacks, alone.
func TestOneSidedFields(t *testing.T) {
	n := 0
	for _, f := range reflect.VisibleFields(reflect.TypeFor[SessionConfig]()) {
		for own, option := range []string{"create", "resume"} {
			if !hasOption(f, option) {
				continue
			}
			n++
			var c SessionConfig
			fill(reflect.ValueOf(&c).Elem().FieldByIndex(f.Index), f.Name, false)
			if _, err := c.encode(startKind(own), testID, nil); err != nil {
				t.Errorf("%s on %s: %v", f.Name, option, err)
			}
			_, err := c.encode(startKind(1-own), testID, nil)
			if !errors.Is(err, ErrInvalidConfig) || !strings.Contains(err.Error(), "SessionConfig."+f.Name+":") {
				t.Errorf("%s not on %s: %v", f.Name, option, err)
			}
		}
	}
	if n != 9 {
		t.Errorf("%d one-sided fields, want 9", n)
	}
}

// structs calls f for t and every struct type of this package below it, once.
func structs(t reflect.Type, seen map[reflect.Type]bool, f func(reflect.Type)) {
	switch t.Kind() {
	case reflect.Pointer, reflect.Slice, reflect.Map:
		structs(t.Elem(), seen, f)
	case reflect.Struct:
		if seen[t] || t.PkgPath() != reflect.TypeFor[SessionConfig]().PkgPath() {
			return
		}
		seen[t] = true
		f(t)
		for i := range t.NumField() {
			if wireName(t.Field(i)) != "-" {
				structs(t.Field(i).Type, seen, f)
			}
		}
	}
}

// TestCase082ThreeStates sets each optional field of every configuration type to unset, zero and a value, among others that are set.
func TestCase082ThreeStates(t *testing.T) {
	n := 0
	check := func(typ reflect.Type) {
		for _, f := range reflect.VisibleFields(typ) {
			if !hasOption(f, "omitempty") {
				continue
			}
			n++
			encode := func(set func(reflect.Value)) (json.RawMessage, bool) {
				v := reflect.New(typ)
				fill(v.Elem(), typ.Name(), false)
				set(v.Elem().FieldByIndex(f.Index))
				raw, err := encodeWire(v.Interface())
				if err != nil {
					t.Fatalf("%v.%s: %v", typ, f.Name, err)
				}
				got, ok := members(t, raw)[wireName(f)]
				return got, ok
			}
			if got, ok := encode(reflect.Value.SetZero); ok {
				t.Errorf("%v.%s unset: sent as %s", typ, f.Name, got)
			}
			if got, ok := encode(func(v reflect.Value) {
				if v.IsZero() { // fill leaves MCPServerConfig.URL to servers of the other type
					v.SetString("http://x")
				}
			}); !ok || string(got) == "null" {
				t.Errorf("%v.%s set: %s", typ, f.Name, got)
			}
			var want string
			switch k := f.Type.Kind(); {
			case f.Type == reflect.TypeFor[json.RawMessage]():
				continue
			case k == reflect.Slice:
				want = "[]"
			case k == reflect.Map:
				want = "{}"
			case k == reflect.Pointer && f.Type.Elem().Kind() == reflect.Bool:
				want = "false"
			case k == reflect.Pointer && f.Type.Elem().Kind() != reflect.Struct:
				want = "0"
			default:
				continue // a zero that means nothing else than unset, or a struct whose own fields are checked
			}
			got, ok := encode(func(v reflect.Value) {
				switch v.Kind() {
				case reflect.Slice:
					v.Set(reflect.MakeSlice(f.Type, 0, 0))
				case reflect.Map:
					v.Set(reflect.MakeMap(f.Type))
				default:
					v.Set(reflect.New(f.Type.Elem()))
				}
			})
			if !ok || string(got) != want {
				t.Errorf("%v.%s zero: got %s, want %s", typ, f.Name, got, want)
			}
		}
	}
	structs(reflect.TypeFor[SessionConfig](), map[reflect.Type]bool{}, check)
	if n < 150 {
		t.Errorf("only %d fields looked at", n)
	}

	// Through the whole of encode, which copies lists and maps.
	got := mustEncode(t, &SessionConfig{
		Tools: []Tool{}, MCPServers: map[string]MCPServerConfig{}, CustomAgents: []CustomAgent{{Name: "a", Prompt: "p", Tools: []string{}}},
		IncludeSubAgentStreamingEvents: new(bool),
	}, startCreate, nil)
	for name, want := range map[string]string{
		"tools": "[]", "mcpServers": "{}", "customAgents": `[{"name":"a","prompt":"p","tools":[]}]`, "includeSubAgentStreamingEvents": "false",
		"streaming": "false",
	} {
		if string(got[name]) != want {
			t.Errorf("%s: got %s, want %s", name, got[name], want)
		}
	}
}

// scramble overwrites all that can be reached from v by reference.
func scramble(v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer, reflect.Interface:
		if !v.IsNil() {
			scramble(v.Elem())
		}
	case reflect.Struct:
		for i := range v.NumField() {
			scramble(v.Field(i))
		}
	case reflect.Slice:
		for i := range v.Len() {
			scramble(v.Index(i))
			v.Index(i).SetZero()
		}
	case reflect.Map:
		for _, k := range v.MapKeys() {
			scramble(v.MapIndex(k))
		}
		v.Clear()
	}
	if v.CanSet() {
		v.SetZero()
	}
}

// TestCase090CallersDataIsCopied changes everything after encode, and finds that encode changed nothing.
func TestCase090CallersDataIsCopied(t *testing.T) {
	for _, o := range []*Options{nil, {Mode: ModeEmpty}} {
		c := fullConfig(t, startResume, false)
		c.Tools = append(c.Tools, Tool{Name: "bare"})
		c.MCPServers["untyped"] = MCPServerConfig{Command: "c"}
		c.SystemMessage.Mode = ""
		before, err := encodeWire(c)
		if err != nil {
			t.Fatal(err)
		}
		e, err := c.encode(startResume, testID, o)
		if err != nil {
			t.Fatal(err)
		}
		params, update := string(e.params), string(e.update)
		if after, _ := encodeWire(c); !bytes.Equal(after, before) {
			t.Errorf("the caller's configuration was changed:\n%s\n%s", before, after)
		}
		scramble(reflect.ValueOf(c))
		if string(e.params) != params || string(e.update) != update {
			t.Errorf("what was encoded changed with the caller's data")
		}
		if !reflect.ValueOf(*c).IsZero() {
			t.Fatal("scramble left something")
		}
	}

	m := &Message{Attachments: []Attachment{{Type: "file", Path: "a"}}, RequestHeaders: map[string]string{"h": "v"}, ResponseFormat: &ResponseFormat{Schema: json.RawMessage(`{}`)}}
	raw, err := m.encode("s")
	if err != nil {
		t.Fatal(err)
	}
	if m.Attachments[0].DisplayName != "" || m.ResponseFormat.Name != "" || m.ResponseFormat.Strict != nil {
		t.Errorf("the caller's message was changed: %v", m)
	}
	was := string(raw)
	scramble(reflect.ValueOf(m))
	if string(raw) != was {
		t.Error("the encoded message changed with the caller's data")
	}
}

func TestSessionConfigInvalid(t *testing.T) {
	tool := func(t Tool) SessionConfig { return SessionConfig{Tools: []Tool{t}} }
	server := func(s MCPServerConfig) SessionConfig {
		return SessionConfig{MCPServers: map[string]MCPServerConfig{"srv": s}}
	}
	transform := func(context.Context, string) (string, error) { return "", nil }
	command := func(context.Context, CommandCall) error { return nil }
	long := strings.Repeat("é", 400)
	for _, tc := range []struct {
		field string // of the error
		cfg   SessionConfig
		id    string // "" is testID
		kind  startKind
	}{
		{field: "SessionID", id: "a.b"},
		{field: "SessionID", id: "a b"},
		{field: "SessionID", id: "../x"},
		{field: "SessionID", id: strings.Repeat("a", 251)},
		{field: "SessionID", cfg: SessionConfig{SessionID: "other"}, kind: startResume},
		{field: "EventBuffer", cfg: SessionConfig{EventBuffer: -1}},
		{field: "Provider", cfg: SessionConfig{Provider: &ProviderConfig{BaseURL: "u"}, Providers: []NamedProviderConfig{{Name: "n", BaseURL: "u"}}}},
		{field: "Provider", cfg: SessionConfig{Provider: &ProviderConfig{BaseURL: "u"}, Models: []ProviderModelConfig{{ID: "i", Provider: "p"}}}},
		{field: "Provider.BaseURL", cfg: SessionConfig{Provider: &ProviderConfig{APIKey: "SECRET"}}},
		{field: "Providers[0].Name", cfg: SessionConfig{Providers: []NamedProviderConfig{{BaseURL: "u", APIKey: "SECRET"}}}},
		{field: "Providers[0].Name", cfg: SessionConfig{Providers: []NamedProviderConfig{{Name: "a/b", BaseURL: "u"}}}},
		{field: "Providers[1].Name", cfg: SessionConfig{Providers: []NamedProviderConfig{{Name: "a", BaseURL: "u"}, {Name: "a", BaseURL: "u"}}}},
		{field: "Providers[0].BaseURL", cfg: SessionConfig{Providers: []NamedProviderConfig{{Name: "a", BearerToken: "SECRET"}}}},
		{field: "Models[0].Provider", cfg: SessionConfig{Models: []ProviderModelConfig{{ID: "i"}}}},
		{field: "GitHubToken", cfg: SessionConfig{GitHubToken: "SECRET", GitHubTokenProviderRegistrationID: "u"}},
		{field: "CanvasProvider.ID", cfg: SessionConfig{CanvasProvider: &CanvasProvider{ID: "connection:1"}}},
		{field: "CanvasProvider.ID", cfg: SessionConfig{CanvasProvider: &CanvasProvider{}}},
		{field: "AvailableTools[1]", cfg: SessionConfig{AvailableTools: []string{"builtin:*", "*"}}},
		{field: "ExcludedTools[0]", cfg: SessionConfig{ExcludedTools: []string{"*"}}},
		{field: "ExcludedTools[0]", cfg: SessionConfig{ExcludedTools: []string{""}}},
		{field: "AvailableTools[0]", cfg: SessionConfig{AvailableTools: []string{"mcp:"}}},
		{field: "Tools[0].Name", cfg: tool(Tool{})},
		{field: "Tools[0].Name", cfg: tool(Tool{Name: "a.b"})},
		{field: "Tools[0].Name", cfg: tool(Tool{Name: long})},
		{field: "Tools[0].Defer", cfg: tool(Tool{Name: "a", Defer: "always"})},
		{field: "Tools[0].Parameters", cfg: tool(Tool{Name: "a", Parameters: []string{"x"}})},
		{field: "Tools[0].Parameters", cfg: tool(Tool{Name: "a", Parameters: "{}"})},
		{field: "Tools[0].Parameters", cfg: tool(Tool{Name: "a", Parameters: json.RawMessage(`{"type":`)})},
		{field: "Tools[0].Parameters", cfg: tool(Tool{Name: "a", Parameters: make(chan int)})},
		{field: `Tools[0].Metadata["m"]`, cfg: tool(Tool{Name: "a", Metadata: map[string]any{"m": math.NaN()}})},
		{field: "Commands[0].Name", cfg: SessionConfig{Commands: []Command{{Handler: command}}}},
		{field: "Commands[0].Name", cfg: SessionConfig{Commands: []Command{{Name: "/a", Handler: command}}}},
		{field: "Commands[0].Name", cfg: SessionConfig{Commands: []Command{{Name: "a b", Handler: command}}}},
		{field: "Commands[0].Handler", cfg: SessionConfig{Commands: []Command{{Name: "a"}}}},
		{field: "Commands[1].Name", cfg: SessionConfig{Commands: []Command{{Name: "a", Handler: command}, {Name: "a", Handler: command}}}},
		{field: "Handlers", cfg: SessionConfig{Handlers: map[string]HandlerFunc{"m": nil}}},
		{field: `MCPServers["srv"].Command`, cfg: server(MCPServerConfig{Env: map[string]string{"K": "SECRET"}})},
		{field: `MCPServers["srv"].Command`, cfg: server(MCPServerConfig{Type: "http", URL: "u", Command: "c"})},
		{field: `MCPServers["srv"].URL`, cfg: server(MCPServerConfig{Type: "sse", Headers: map[string]string{"K": "SECRET"}})},
		{field: `MCPServers["srv"].URL`, cfg: server(MCPServerConfig{Command: "c", URL: "u"})},
		{field: `MCPServers["srv"].Timeout`, cfg: server(MCPServerConfig{Command: "c", Timeout: -1})},
		{field: `MCPServers["srv"].Extra["command"]`, cfg: server(MCPServerConfig{Command: "c", Extra: map[string]json.RawMessage{"command": json.RawMessage(`1`)}})},
		{field: `MCPServers[""]`, cfg: SessionConfig{MCPServers: map[string]MCPServerConfig{"": {Command: "c"}}}},
		{field: `CustomAgents[0].MCPServers["x"].Command`, cfg: SessionConfig{CustomAgents: []CustomAgent{{Name: "n", Prompt: "p", MCPServers: map[string]MCPServerConfig{"x": {}}}}}},
		{field: "CustomAgents[0].Prompt", cfg: SessionConfig{CustomAgents: []CustomAgent{{Name: "n"}}}},
		{field: "Cloud.Repository.Owner", cfg: SessionConfig{Cloud: &CloudOptions{Repository: &CloudRepository{Name: "n"}}}},
		{field: "SystemMessage.Mode", cfg: SessionConfig{SystemMessage: &SystemMessage{Mode: "prepend"}}},
		{field: "SystemMessage.Sections", cfg: SessionConfig{SystemMessage: &SystemMessage{Mode: "append", Sections: map[string]SystemSection{"tone": {Action: "remove"}}}}},
		{field: `SystemMessage.Sections["tone"].Action`, cfg: SessionConfig{SystemMessage: &SystemMessage{Sections: map[string]SystemSection{"tone": {Action: "delete"}}}}},
		{field: "Transforms", cfg: SessionConfig{Transforms: map[string]func(context.Context, string) (string, error){"tone": nil}}},
		{field: "Transforms", cfg: SessionConfig{Transforms: map[string]func(context.Context, string) (string, error){"": transform}}},
		{field: "Transforms", cfg: SessionConfig{SystemMessage: &SystemMessage{Mode: "replace"}, Transforms: map[string]func(context.Context, string) (string, error){"tone": transform}}},
		{field: "SandboxConfig", cfg: SessionConfig{SandboxConfig: json.RawMessage("{")}},
		{field: `Extra["streaming"]`, cfg: SessionConfig{Extra: map[string]json.RawMessage{"streaming": json.RawMessage("true")}}},
		{field: `Extra["envValueMode"]`, cfg: SessionConfig{Extra: map[string]json.RawMessage{"envValueMode": json.RawMessage("true")}}},
		{field: `Extra["new"]`, cfg: SessionConfig{Extra: map[string]json.RawMessage{"new": json.RawMessage("{")}}},
	} {
		t.Run(tc.field, func(t *testing.T) {
			id := tc.id
			if id == "" {
				id = testID
			}
			e, err := tc.cfg.encode(tc.kind, id, nil)
			if !errors.Is(err, ErrInvalidConfig) {
				t.Fatalf("got %v, %v", e, err)
			}
			text := err.Error()
			if !strings.Contains(text, "SessionConfig."+tc.field+":") {
				t.Errorf("%q does not name %s", text, tc.field)
			}
			if strings.Contains(text, "SECRET") || strings.Contains(text, id) || len(text) > 400 {
				t.Errorf("%q says too much", text)
			}
			if strings.Count(text, ErrInvalidConfig.Error()) != 1 {
				t.Errorf("%q repeats itself", text)
			}
		})
	}
	if _, err := (&SessionConfig{}).encode(startResume, "", nil); !errors.Is(err, ErrInvalidConfig) {
		t.Errorf("resume without an id: %v", err)
	}
	e, err := (&SessionConfig{Cloud: &CloudOptions{}}).encode(startCreate, "", nil)
	if err != nil {
		t.Fatal(err)
	}
	if m := members(t, e.params); m["sessionId"] != nil || string(m["cloud"]) != "{}" {
		t.Errorf("cloud without an id: %s", e.params)
	}
	for _, id := range []string{"a", strings.Repeat("Z", 250), "a_b-9"} {
		if _, err := (&SessionConfig{SessionID: id}).encode(startResume, id, nil); err != nil {
			t.Errorf("id of %d bytes: %v", len(id), err)
		}
	}
}

// TestHandlersSetTheirFlag installs each handler alone.
func TestHandlersSetTheirFlag(t *testing.T) {
	flags := []string{"requestPermission", "requestUserInput", "requestElicitation", "requestExitPlanMode", "requestAutoModeSwitch", "hooks"}
	for field, flag := range map[string]string{
		"OnPermission": "requestPermission", "OnUserInput": "requestUserInput", "OnElicitation": "requestElicitation",
		"OnExitPlanMode": "requestExitPlanMode", "OnAutoModeSwitch": "requestAutoModeSwitch", "OnHook": "hooks", "Hooks": "hooks", "OnMCPAuth": "",
	} {
		var c SessionConfig
		fill(reflect.ValueOf(&c).Elem().FieldByName(field), "", false)
		for _, kind := range []startKind{startCreate, startResume} {
			got := mustEncode(t, &c, kind, nil)
			for _, f := range flags {
				if want := fmt.Sprint(f == flag); string(got[f]) != want {
					t.Errorf("%s: %s is %s, want %s", field, f, got[f], want)
				}
			}
		}
	}
	if got := mustEncode(t, &SessionConfig{Hooks: &Hooks{}}, startCreate, nil); string(got["hooks"]) != "false" {
		t.Errorf("hooks without a function: %s", got["hooks"])
	}
}

func TestCase073ToolSchemas(t *testing.T) {
	type schema struct {
		Type       string         `json:"type"`
		Properties map[string]any `json:"properties"`
		Required   []string       `json:"required"`
	}
	const none = `{"type":"object","properties":{}}`
	for _, tc := range []struct {
		name       string
		parameters any
		want       string
	}{
		{"nil", nil, none},
		{"nil raw", json.RawMessage(nil), none},
		{"null", json.RawMessage(" null "), none},
		{"nil map", map[string]any(nil), none},
		{"nil pointer", (*schema)(nil), none},
		{"empty object", json.RawMessage("{}"), none},
		{"struct with nil lists", schema{Type: "object"}, none},
		{"pointer", &schema{Type: "object", Required: []string{"a"}}, `{"type":"object","required":["a"],"properties":{}}`},
		{"order and digits kept", json.RawMessage(`{"properties": {"z": {"maximum": 12345678901234567890}, "a": {}}, "type": "object"}`),
			`{"properties":{"z":{"maximum":12345678901234567890},"a":{}},"type":"object"}`},
		{"nested required", json.RawMessage(`{"type":"object","properties":{"a":{"type":"object","required":null},"b":{"anyOf":[{"required":null},{"default":null}]}}}`),
			`{"type":"object","properties":{"a":{"type":"object"},"b":{"anyOf":[{},{"default":null}]}}}`},
		{"no type", map[string]any{"properties": map[string]any{"<a>": true}}, `{"type":"object","properties":{"<a>":true}}`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := mustEncode(t, &SessionConfig{Tools: []Tool{{Name: "t", Parameters: tc.parameters}}}, startCreate, nil)
			if want := `[{"name":"t","parameters":` + tc.want + `}]`; string(got["tools"]) != want {
				t.Errorf("got %s, want %s", got["tools"], want)
			}
		})
	}
}

func TestCase074ToolNames(t *testing.T) {
	_, err := (&SessionConfig{Tools: []Tool{{Name: "view"}, {Name: "edit"}, {Name: "view"}}}).encode(startCreate, testID, nil)
	if !errors.Is(err, ErrInvalidConfig) || !strings.Contains(err.Error(), `Tools[2].Name: "view"`) {
		t.Errorf("two of a name: %v", err)
	}
	got := mustEncode(t, &SessionConfig{Tools: []Tool{{Name: "view", OverridesBuiltIn: true}, {Name: "edit"}}}, startCreate, nil)
	const want = `[{"name":"view","parameters":{"type":"object","properties":{}},"overridesBuiltInTool":true},{"name":"edit","parameters":{"type":"object","properties":{}}}]`
	if string(got["tools"]) != want {
		t.Errorf("got %s, want %s", got["tools"], want)
	}
}

func TestSystemMessage(t *testing.T) {
	transform := func(context.Context, string) (string, error) { return "", nil }
	transforms := func(ids ...string) map[string]func(context.Context, string) (string, error) {
		m := make(map[string]func(context.Context, string) (string, error))
		for _, id := range ids {
			m[id] = transform
		}
		return m
	}
	for _, tc := range []struct {
		name string
		cfg  SessionConfig
		mode ClientMode
		want string
	}{
		{name: "none"},
		{name: "unset mode", cfg: SessionConfig{SystemMessage: &SystemMessage{Content: "a<b"}}, want: `{"content":"a<b"}`},
		{name: "sections alone", cfg: SessionConfig{SystemMessage: &SystemMessage{Sections: map[string]SystemSection{"tone": {Action: "remove"}}}},
			want: `{"mode":"customize","sections":{"tone":{"action":"remove"}}}`},
		{name: "transform alone", cfg: SessionConfig{Transforms: transforms("tone")}, want: `{"mode":"customize","sections":{"tone":{"action":"transform"}}}`},
		{name: "transform promotes append", cfg: SessionConfig{SystemMessage: &SystemMessage{Mode: "append", Content: "c"}, Transforms: transforms("tone")},
			want: `{"mode":"customize","content":"c","sections":{"tone":{"action":"transform"}}}`},
		{name: "the caller's section stays", cfg: SessionConfig{Transforms: transforms("tone", "safety"),
			SystemMessage: &SystemMessage{Mode: "customize", Sections: map[string]SystemSection{"tone": {Action: "replace", Content: "x"}}}},
			want: `{"mode":"customize","sections":{"safety":{"action":"transform"},"tone":{"action":"replace","content":"x"}}}`},
		{name: "empty mode promotes", mode: ModeEmpty, cfg: SessionConfig{SystemMessage: &SystemMessage{Mode: "append", Content: "c"}},
			want: `{"mode":"customize","content":"c","sections":{"environment_context":{"action":"remove"}}}`},
		{name: "empty mode leaves replace", mode: ModeEmpty, cfg: SessionConfig{SystemMessage: &SystemMessage{Mode: "replace", Content: "c"}},
			want: `{"mode":"replace","content":"c"}`},
		{name: "empty mode leaves the section", mode: ModeEmpty, cfg: SessionConfig{
			SystemMessage: &SystemMessage{Mode: "customize", Sections: map[string]SystemSection{"environment_context": {Action: "preserve"}}}},
			want: `{"mode":"customize","sections":{"environment_context":{"action":"preserve"}}}`},
		{name: "empty mode leaves the transform", mode: ModeEmpty, cfg: SessionConfig{Transforms: transforms("environment_context")},
			want: `{"mode":"customize","sections":{"environment_context":{"action":"transform"}}}`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tc.cfg.AvailableTools = []string{}
			got := mustEncode(t, &tc.cfg, startCreate, &Options{Mode: tc.mode})
			if string(got["systemMessage"]) != tc.want {
				t.Errorf("got %s, want %s", got["systemMessage"], tc.want)
			}
		})
	}
}

// TestSmallRules covers single decisions of the encoding.
func TestSmallRules(t *testing.T) {
	wd, err := filepath.Abs("sub")
	if err != nil {
		t.Fatal(err)
	}
	wdJSON, _ := json.Marshal(wd)
	got := mustEncode(t, &SessionConfig{
		WorkingDirectory: "sub",
		Commands:         []Command{{Name: "deploy", Handler: func(context.Context, CommandCall) error { return nil }}},
		MCPServers: map[string]MCPServerConfig{
			"b": {URL: "https://x/?a=1&b=2", Timeout: time.Nanosecond, Extra: map[string]json.RawMessage{"oauthClientId": json.RawMessage(`"id"`)}},
			"a": {Command: "c", Timeout: math.MaxInt64},
			"c": {Type: "later"},
		},
		Provider: &ProviderConfig{BaseURL: "u", BearerTokenProvider: func(context.Context, string) (string, error) { return "", nil }},
		Extra:    map[string]json.RawMessage{"future": json.RawMessage(`{"a": [1]}`)},
	}, startCreate, nil)
	for name, want := range map[string]string{
		"workingDirectory": string(wdJSON),
		"commands":         `[{"name":"deploy","description":""}]`,
		"mcpServers":       `{"a":{"type":"stdio","timeout":9223372036855,"command":"c"},"b":{"type":"http","timeout":1,"url":"https://x/?a=1&b=2","oauthClientId":"id"},"c":{"type":"later"}}`,
		"provider":         `{"baseUrl":"u","hasBearerTokenProvider":true}`,
		"future":           `{"a":[1]}`,
	} {
		if string(got[name]) != want {
			t.Errorf("%s: got %s, want %s", name, got[name], want)
		}
	}
	for _, tool := range IsolatedTools() {
		if !regexp.MustCompile(`^builtin:[a-z_]+$`).MatchString(tool) {
			t.Error(tool)
		}
	}
}

// secretHolders are values of every type that holds secrets, filled.
func secretHolders(t *testing.T) []any {
	t.Helper()
	var list []any
	for _, p := range []any{&ProviderConfig{}, &NamedProviderConfig{}, &MCPServerConfig{}, &Message{}, &Options{}, &MCPAuthToken{}, &CustomAgent{}} {
		fill(reflect.ValueOf(p).Elem(), "", false)
		list = append(list, p)
	}
	return append(list, fullConfig(t, startResume, false), fullConfig(t, startCreate, true))
}

// TestCase089SecretsDoNotPrint prints everything that holds secrets in every way that programs print.
func TestCase089SecretsDoNotPrint(t *testing.T) {
	for _, p := range secretHolders(t) {
		typ := reflect.TypeOf(p).Elem()
		wire, err := encodeWire(p)
		if err != nil {
			t.Fatalf("%v: %v", typ, err)
		}
		if !bytes.Contains(wire, []byte("SECRET")) {
			t.Fatalf("%v: no secret reaches the wire: the test is blind", typ)
		}
		value := reflect.ValueOf(p).Elem().Interface()
		slice := reflect.Append(reflect.MakeSlice(reflect.SliceOf(typ), 0, 1), reflect.ValueOf(value)).Interface()
		for i, v := range []any{p, value, slice, map[string]any{"k": value}, []any{p}, struct{ X any }{value}, struct{ X any }{p}} {
			var texts []string
			for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "% X", "%d", "%t", "%10.3v"} {
				texts = append(texts, fmt.Sprintf(verb, v))
			}
			texts = append(texts, fmt.Sprint(v), fmt.Errorf("wrapped %v", v).Error())
			raw, err := json.Marshal(v)
			if err != nil {
				t.Errorf("%T: %v", v, err)
			}
			texts = append(texts, string(raw))
			var log bytes.Buffer
			for _, h := range []slog.Handler{slog.NewTextHandler(&log, nil), slog.NewJSONHandler(&log, nil)} {
				slog.New(h).Info("m", "v", v, slog.Group("g", slog.Any("v", v)))
			}
			texts = append(texts, log.String())
			for way, text := range texts {
				if strings.Contains(text, "SECRET") || strings.Contains(strings.ToLower(text), "534543524554") {
					t.Errorf("%T, way %d: %.300s", v, way, text)
				}
			}
			if i < 2 && !strings.Contains(texts[1], redacted) {
				t.Errorf("%T: %%+v does not say that there is a secret: %.300s", v, texts[1])
			}
		}

		// secrets lists exactly what is tagged.
		var want []string
		for _, s := range regexp.MustCompile(`"SECRET ([^"]*)"`).FindAllStringSubmatch(string(wire), -1) {
			want = append(want, "SECRET "+s[1])
		}
		slices.Sort(want)
		got := secretsOf(p)
		slices.Sort(got)
		if want = slices.Compact(want); !slices.Equal(got, want) {
			t.Errorf("%v: secrets are %q, want %q", typ, got, want)
		}

		// Tags follow names; methods follow tags, also of what is inside.
		structs(typ, map[reflect.Type]bool{}, func(outer reflect.Type) {
			for i := range outer.NumField() {
				f := outer.Field(i)
				holds := f.Type.Kind() == reflect.String || f.Type == reflect.TypeFor[map[string]string]() || f.Name == "Env"
				if holds && regexp.MustCompile(`(?i)token$|key$|secret|password|headers|^env$`).MatchString(f.Name) && !hasOption(f, "secret") {
					t.Errorf("%v.%s is not tagged as a secret", outer, f.Name)
				}
			}
			structs(outer, map[reflect.Type]bool{}, func(inner reflect.Type) {
				for _, f := range reflect.VisibleFields(inner) {
					_, format := reflect.Zero(outer).Interface().(fmt.Formatter)
					_, marshal := reflect.Zero(outer).Interface().(json.Marshaler)
					if hasOption(f, "secret") && (!format || !marshal) {
						t.Errorf("%v holds %v.%s and prints it", outer, inner, f.Name)
					}
				}
			})
		})
	}

	var nilConfig *SessionConfig
	if got := fmt.Sprintf("%v", nilConfig); got != "<nil>" {
		t.Errorf("nil prints as %s", got)
	}
	if got := fmt.Sprintf("%+v", ProviderConfig{BaseURL: "u", APIKey: "SECRET"}); got != `copilot.ProviderConfig{"baseUrl":"u","apiKey":"[redacted]"}` {
		t.Error(got)
	}
	if got := fmt.Sprintf("%v", SessionConfig{GitHubToken: "SECRET", Tools: []Tool{{Parameters: make(chan int)}}}); strings.Contains(got, "SECRET") {
		t.Error(got)
	}
}

func TestSecretsForMasking(t *testing.T) {
	c := &SessionConfig{
		GitHubToken: "gho_1234",
		Provider:    &ProviderConfig{APIKey: "1", Headers: map[string]string{"Authorization": "Bearer abcdefgh", "X": "gho_1234"}},
		MCPServers:  map[string]MCPServerConfig{"s": {Env: map[string]string{"A": "true-value", "B": "no"}}},
	}
	want := []string{"Bearer abcdefgh", "true-value", "abcdefgh", "gho_1234"} // no "1", no "no"
	if got := c.secrets(); !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	o := &Options{GitHubToken: "gho_1234", Env: []string{"PATH=/bin", "MY_API_KEY=xyzzy"}}
	if got, want := secretsOf(o), []string{"MY_API_KEY=xyzzy", "PATH=/bin", "gho_1234", "xyzzy"}; !slices.Equal(got, want) {
		t.Errorf("options: got %q, want %q", got, want)
	}
	if got := (*SessionConfig)(nil).secrets(); len(got) != 0 {
		t.Errorf("nil has %q", got)
	}
}

func TestMessageGolden(t *testing.T) {
	var m Message
	fill(reflect.ValueOf(&m).Elem(), "", false)
	m.Mode, m.AgentMode = Enqueue, AgentModePlan
	m.Attachments = []Attachment{{Type: "file", Path: "/a/b.go"}}
	m.ResponseFormat.Schema = map[string]any{"type": "object"}
	raw, err := m.encode("the-session")
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "message.json", raw)
	got := members(t, raw)
	for _, f := range reflect.VisibleFields(reflect.TypeFor[Message]()) {
		if got[wireName(f)] == nil {
			t.Errorf("%s is not sent", f.Name)
		}
	}

	raw, err = (&Message{Prompt: "<&>\u2028", Attachments: []Attachment{}, RequestHeaders: map[string]string{}, Billable: new(bool)}).encode("s")
	if want := `{"sessionId":"s","prompt":"<&>\u2028","billable":false}`; err != nil || string(raw) != want {
		t.Errorf("got %s, %v, want %s", raw, err, want)
	}
	raw, err = (&Message{ResponseFormat: &ResponseFormat{Schema: json.RawMessage(`{}`)}}).encode("s")
	if want := `{"sessionId":"s","responseFormat":{"type":"json_schema","jsonSchema":{"name":"response","schema":{},"strict":true}},"prompt":""}`; err != nil || string(raw) != want {
		t.Errorf("got %s, %v, want %s", raw, err, want)
	}
}

func TestMessageInvalid(t *testing.T) {
	for _, tc := range []struct {
		field string
		m     Message
	}{
		{"Mode", Message{Mode: "later"}},
		{"AgentMode", Message{AgentMode: "yolo"}},
		{"ResponseFormat", Message{Mode: Immediate, ResponseFormat: &ResponseFormat{Schema: map[string]any{}}}},
		{"ResponseFormat.Schema", Message{ResponseFormat: &ResponseFormat{}}},
		{"ResponseFormat.Schema", Message{ResponseFormat: &ResponseFormat{Schema: 1}}},
		{"ResponseFormat.Schema", Message{ResponseFormat: &ResponseFormat{Schema: make(chan int)}}},
		{"Attachments[1]", Message{Attachments: []Attachment{{Type: "github_url", URL: "u"}, {Type: "video"}}}},
	} {
		raw, err := tc.m.encode("the-session")
		if !errors.Is(err, ErrInvalidConfig) || !strings.Contains(err.Error(), "Message."+tc.field+":") {
			t.Errorf("%s: got %s, %v", tc.field, raw, err)
		} else if strings.Contains(err.Error(), "the-session") {
			t.Errorf("%v shows the id", err)
		}
	}
}

func TestAttachments(t *testing.T) {
	const png = "iVBORw0KGgowMDAw" // the signature of PNG, and more
	at := time.Date(2025, 1, 2, 3, 4, 5, 0, time.UTC)
	repo := &GitHubRepo{Owner: "o", Name: "n"}
	for _, tc := range []struct {
		a    Attachment
		want string // "" is an error
	}{
		{Attachment{Type: "file", Path: "/a/b.go"}, `{"type":"file","path":"/a/b.go","displayName":"b.go"}`},
		{Attachment{Type: "file", Path: `C:\a\b.go`}, `{"type":"file","path":"C:\\a\\b.go","displayName":"b.go"}`},
		{Attachment{Type: "file", Path: "b", DisplayName: "mine", LineRange: &LineRange{Start: 1, End: 2}},
			`{"type":"file","path":"b","displayName":"mine","lineRange":{"start":1,"end":2}}`},
		{Attachment{Type: "directory", Path: "/a/dir/"}, `{"type":"directory","path":"/a/dir/","displayName":"dir"}`},
		{Attachment{Type: "directory", Path: "/"}, `{"type":"directory","path":"/","displayName":"/"}`},
		{Attachment{Type: "selection", FilePath: "/a/b.go", Selection: &Selection{}},
			`{"type":"selection","filePath":"/a/b.go","displayName":"b.go","text":"","selection":{"start":{"line":0,"character":0},"end":{"line":0,"character":0}}}`},
		{Attachment{Type: "github_reference", Number: 7, ReferenceType: "pr", URL: "u"},
			`{"type":"github_reference","url":"u","number":7,"title":"","referenceType":"pr","state":""}`},
		{Attachment{Type: "github_commit", Repo: repo, OID: "1", URL: "u"}, `{"type":"github_commit","url":"u","repo":{"name":"n","owner":"o"},"oid":"1","message":""}`},
		{Attachment{Type: "github_file_diff", URL: "u", Base: &GitHubRevision{Repo: *repo, Ref: "r", Path: "p"}},
			`{"type":"github_file_diff","url":"u","base":{"repo":{"name":"n","owner":"o"},"ref":"r","path":"p"}}`},
		{Attachment{Type: "github_url", URL: "u"}, `{"type":"github_url","url":"u"}`},
		{Attachment{Type: "blob", Data: "aGk=", MIMEType: "text/plain"}, `{"type":"blob","displayName":"attachment","data":"aGk=","mimeType":"text/plain"}`},
		{Attachment{Type: "blob", Data: png, MIMEType: "image/png"}, `{"type":"blob","displayName":"attachment","data":"iVBORw0KGgowMDAw","mimeType":"image/png"}`},
		{Attachment{Type: "extension_context", ExtensionID: "e", CapturedAt: &at, Payload: json.RawMessage(`1.0`)},
			`{"type":"extension_context","title":"","extensionId":"e","payload":1.0,"capturedAt":"2025-01-02T03:04:05Z"}`},

		{Attachment{}, ""},
		{Attachment{Type: "File", Path: "a"}, ""},
		{Attachment{Type: "file"}, ""},
		{Attachment{Type: "file", FilePath: "a"}, ""},
		{Attachment{Type: "file", Path: "a", URL: "u"}, ""},
		{Attachment{Type: "selection", FilePath: "a"}, ""},
		{Attachment{Type: "github_url", URL: "u", DisplayName: "d"}, ""},
		{Attachment{Type: "github_reference", Number: 7, ReferenceType: "mr", URL: "u"}, ""},
		{Attachment{Type: "github_commit", OID: "1", URL: "u"}, ""},
		{Attachment{Type: "blob", Data: "aGk="}, ""},
		{Attachment{Type: "blob", MIMEType: "text/plain"}, ""},
		{Attachment{Type: "blob", MIMEType: "text/plain", Data: "aGk"}, ""},
		{Attachment{Type: "blob", MIMEType: "text/plain", Data: "aG\nk="}, ""},
		{Attachment{Type: "blob", MIMEType: "text/plain", Data: "data:text/plain;base64,aGk="}, ""},
		{Attachment{Type: "github_file_diff", URL: "u", Head: &GitHubRevision{Repo: *repo, Ref: "r"}}, ""},
		{Attachment{Type: "github_tree_comparison", URL: "u", Head: &GitHubRevision{Revision: "r"}}, ""},
		{Attachment{Type: "github_tree_comparison", URL: "u", Head: &GitHubRevision{Revision: "r"}, Base: &GitHubRevision{Ref: "r", Path: "p"}}, ""},
		{Attachment{Type: "blob", MIMEType: "image/png", Data: "aGk="}, ""},
		{Attachment{Type: "extension_context", ExtensionID: "e", CapturedAt: &at, Payload: json.RawMessage(`{`)}, ""},
		{Attachment{Type: "extension_context", ExtensionID: "e"}, ""},
	} {
		raw, err := tc.a.encode()
		if string(raw) != tc.want || (err == nil) != (tc.want != "") {
			t.Errorf("%s: got %s, %v, want %s", tc.a.Type, raw, err, tc.want)
		}
	}

	// Every kind's members are fields, and every field belongs to a kind.
	left := map[string]bool{}
	for _, f := range reflect.VisibleFields(reflect.TypeFor[Attachment]()) {
		left[wireName(f)] = true
	}
	fields := fmt.Sprint(left)
	for _, kind := range []string{"file", "directory", "selection", "github_reference", "github_commit", "github_release", "github_actions_job",
		"github_repository", "github_file_diff", "github_tree_comparison", "github_url", "github_file", "github_snippet", "blob", "extension_context"} {
		for _, m := range strings.Fields(attachmentMembers(kind)) {
			m = strings.TrimRight(m, "!?")
			if !strings.Contains(fields, m+":") {
				t.Errorf("%s: no field for %s", kind, m)
			}
			delete(left, m)
		}
	}
	if delete(left, "type"); len(left) > 0 {
		t.Errorf("fields of no kind: %v", left)
	}
}
