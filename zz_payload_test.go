package copilot

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode"
)

// inspectSource calls visit for the nodes of the package's files, tests excepted. What the tests read from the source
// cannot be forgotten in them.
func inspectSource(t testing.TB, visit func(ast.Node) bool) {
	t.Helper()
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(f, visit)
	}
}

// eventConstants returns the names of the constants of type EventType.
func eventConstants(t testing.TB) map[EventType]string {
	t.Helper()
	names := make(map[EventType]string)
	inspectSource(t, func(n ast.Node) bool {
		spec, ok := n.(*ast.ValueSpec)
		if !ok {
			return true
		}
		if id, ok := spec.Type.(*ast.Ident); !ok || id.Name != "EventType" {
			return true
		}
		value, err := strconv.Unquote(spec.Values[0].(*ast.BasicLit).Value)
		if err != nil {
			t.Fatal(err)
		}
		if other := names[EventType(value)]; other != "" {
			t.Errorf("%s and %s are both %q", other, spec.Names[0].Name, value)
		}
		names[EventType(value)] = spec.Names[0].Name
		return true
	})
	if len(names) == 0 {
		t.Fatal("no constants of type EventType found")
	}
	return names
}

// typedEvents returns the event types that have a payload type, sorted.
func typedEvents(t testing.TB) []EventType {
	t.Helper()
	var types []EventType
	for typ := range eventConstants(t) {
		if newPayload(typ) != nil {
			types = append(types, typ)
		}
	}
	slices.Sort(types)
	return types
}

// goWords are the words that Go writes in a casing of their own, each before those it begins with.
var goWords = []string{"GitHub", "OAuth", "HTTP", "MIME", "BYOK", "TTFT", "WWW", "API", "MCP", "URL", "URI", "LLM", "AIU", "TTL",
	"CWD", "OID", "RTE", "AI", "ID", "UI"}

// wireSpelling turns the Go name of a field into the name it must have on the wire.
func wireSpelling(name string) string {
	var words []string
next:
	for name != "" {
		for _, w := range goWords {
			if strings.HasPrefix(name, w) {
				words, name = append(words, w), name[len(w):]
				continue next
			}
		}
		n := 1 + strings.IndexFunc(name[1:], unicode.IsUpper)
		if n == 0 {
			n = len(name)
		}
		words, name = append(words, name[:n]), name[n:]
	}
	for i, w := range words {
		words[i] = strings.ToLower(w)
		if i > 0 && unicode.IsUpper(rune(w[0])) {
			words[i] = strings.ToUpper(w[:1]) + words[i][1:]
		}
	}
	return strings.Join(words, "")
}

func TestEventNames(t *testing.T) {
	separator := regexp.MustCompile(`[._]`)
	for typ, name := range eventConstants(t) {
		var want strings.Builder
		for _, w := range separator.Split(string(typ), -1) {
			switch w {
			case "id", "url", "mcp", "ui", "api":
				w = strings.ToUpper(w)
			case "oauth":
				w = "OAuth"
			}
			want.WriteString(strings.ToUpper(w[:1]) + w[1:])
		}
		if name != "Event"+want.String() {
			t.Errorf("%q: constant is %s, want Event%s", typ, name, want.String())
		}
		p := newPayload(typ)
		if p == nil {
			continue
		}
		got := reflect.TypeOf(p).Elem().Name()
		// Three names belong to other types of the package.
		taken := typ == EventSessionError || typ == EventSessionInfo || typ == EventSystemMessage
		if got != want.String() && !(taken && got == want.String()+"Event") {
			t.Errorf("%q: payload type is %s, want %s", typ, got, want.String())
		}
	}
}

func TestEveryPayloadTypeHasAnEvent(t *testing.T) {
	made := map[string]bool{"RawPayload": true}
	for _, typ := range typedEvents(t) {
		made[reflect.TypeOf(newPayload(typ)).Elem().Name()] = true
	}
	inspectSource(t, func(n ast.Node) bool {
		if f, ok := n.(*ast.FuncDecl); ok && f.Recv != nil && f.Name.Name == "payload" {
			if name := f.Recv.List[0].Type.(*ast.StarExpr).X.(*ast.Ident).Name; !made[name] {
				t.Errorf("no event type gives a *%s", name)
			}
		}
		return true
	})
}

// filler fills values with data that occurs nowhere else in them.
type filler struct{ n int64 }

func (f *filler) fill(t *testing.T, v reflect.Value) {
	t.Helper()
	f.n++
	switch v.Interface().(type) {
	case time.Time:
		v.Set(reflect.ValueOf(time.Unix(1_800_000_000+f.n, 0).UTC()))
		return
	case json.RawMessage:
		v.SetBytes([]byte(fmt.Sprintf(`{"n":%d.0,"big":12345678901234567890}`, f.n)))
		return
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString(fmt.Sprintf("s%d", f.n))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int64:
		v.SetInt(f.n)
	case reflect.Float64:
		v.SetFloat(float64(f.n) + 0.5)
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		f.fill(t, v.Elem())
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		f.fill(t, v.Index(0))
		f.fill(t, v.Index(1))
	case reflect.Map:
		elem := reflect.New(v.Type().Elem()).Elem()
		f.fill(t, elem)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(reflect.ValueOf(fmt.Sprintf("k%d", f.n)), elem)
	case reflect.Struct:
		for i := range v.NumField() {
			f.fill(t, v.Field(i))
		}
	default:
		t.Fatalf("no way to fill a %s", v.Type())
	}
}

// fields returns the JSON fields of a struct type, those of embedded structs among them, by wire name.
func fields(typ reflect.Type) map[string]reflect.StructField {
	byName := make(map[string]reflect.StructField)
	for _, f := range reflect.VisibleFields(typ) {
		if !f.Anonymous {
			name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			byName[name] = f
		}
	}
	return byName
}

// checkTags reports JSON names that are missing, double or not the field's.
func checkTags(t *testing.T, typ reflect.Type) {
	t.Helper()
	switch {
	case typ == reflect.TypeFor[time.Time]() || typ == reflect.TypeFor[json.RawMessage]():
	case typ.Kind() == reflect.Pointer || typ.Kind() == reflect.Slice || typ.Kind() == reflect.Map:
		checkTags(t, typ.Elem())
	case typ.Kind() == reflect.Struct:
		seen := make(map[string]string)
		for _, f := range reflect.VisibleFields(typ) {
			if f.Anonymous {
				continue
			}
			name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			if want := wireSpelling(f.Name); name != want {
				t.Errorf("%s.%s: JSON name is %q, want %q", typ, f.Name, name, want)
			}
			if other, ok := seen[name]; ok {
				t.Errorf("%s: %s and %s share the JSON name %q", typ, other, f.Name, name)
			}
			seen[name] = f.Name
			checkTags(t, f.Type)
		}
	}
}

func TestPayloadRoundTrip(t *testing.T) {
	for _, typ := range typedEvents(t) {
		t.Run(string(typ), func(t *testing.T) {
			want := newPayload(typ)
			checkTags(t, reflect.TypeOf(want))
			new(filler).fill(t, reflect.ValueOf(want).Elem())
			data, err := json.Marshal(want)
			if err != nil {
				t.Fatal(err)
			}
			got := Event{Type: typ, Data: data}.Payload()
			if !reflect.DeepEqual(got, want) {
				t.Errorf("got  %+v\nwant %+v\ndata %s", got, want, data)
			}
		})
	}
}

// wantRaw checks that p is a raw payload with the error of a misfit and the data untouched.
func wantRaw(t *testing.T, p Payload, e Event) {
	t.Helper()
	raw, ok := p.(*RawPayload)
	if !ok {
		t.Fatalf("%s with data %s: payload is %T, want *RawPayload", e.Type, e.Data, p)
	}
	var misfit *DecodeError
	if !errors.As(raw.Err, &misfit) || misfit.Type != e.Type {
		t.Errorf("%s with data %s: error is %v, want a *DecodeError of that type", e.Type, e.Data, raw.Err)
	}
	if raw.Type != e.Type || !bytes.Equal(raw.Data, e.Data) {
		t.Errorf("raw payload is %s %s, want %s %s", raw.Type, raw.Data, e.Type, e.Data)
	}
}

func TestCase058OddPayloads(t *testing.T) {
	odd := []string{`"s"`, `-1`, `1.5`, `1e400`, `true`, `{}`, `[]`, `[{}]`, `{"x":[]}`, `[null]`}
	for _, typ := range typedEvents(t) {
		t.Run(string(typ), func(t *testing.T) {
			full := newPayload(typ)
			new(filler).fill(t, reflect.ValueOf(full).Elem())
			data, err := json.Marshal(full)
			if err != nil {
				t.Fatal(err)
			}
			before, after := Event{Type: typ, Data: data}, Event{Type: typ, Data: data}
			decode := func(data string) (Event, Payload) {
				t.Helper()
				e := Event{Type: typ, Data: json.RawMessage(data)}
				first, p, last := before.Payload(), e.Payload(), after.Payload()
				if string(e.Data) != data {
					t.Fatalf("data %s was changed to %s", data, e.Data)
				}
				if !reflect.DeepEqual(first, full) || !reflect.DeepEqual(last, full) {
					t.Fatalf("data %s disturbed its neighbours", data)
				}
				return e, p
			}

			for _, data := range []string{"", "null", "{}", `{"fromTheFuture":{"a":[1]}}`} {
				if _, p := decode(data); !reflect.DeepEqual(p, newPayload(typ)) {
					t.Errorf("data %q: payload is %#v, want an empty one", data, p)
				}
			}
			for _, data := range []string{`"s"`, `7`, `true`, `[]`, `{`, `{"a":}`, `nul`} {
				e, p := decode(data)
				wantRaw(t, p, e)
			}
			for name, f := range fields(reflect.TypeOf(full).Elem()) {
				if _, p := decode(fmt.Sprintf(`{%q:null}`, name)); reflect.TypeOf(p) != reflect.TypeOf(full) {
					t.Errorf("%s null: payload is %#v", name, p)
				}
				misfits := 0
				for _, v := range odd {
					e, p := decode(fmt.Sprintf(`{%q:%s}`, name, v))
					if reflect.TypeOf(p) != reflect.TypeOf(full) {
						wantRaw(t, p, e)
						misfits++
					}
				}
				if f.Type != reflect.TypeFor[json.RawMessage]() && misfits == 0 {
					t.Errorf("%s took every one of %q", name, odd)
				}
			}
		})
	}
}

func TestPayloadUnknownType(t *testing.T) {
	for _, typ := range []EventType{"", "future.thing", EventPendingMessagesModified} {
		e := Event{Type: typ, Data: json.RawMessage(`{"a":1.0}`)}
		want := &RawPayload{Type: typ, Data: e.Data}
		if got := e.Payload(); !reflect.DeepEqual(got, want) {
			t.Errorf("%q: payload is %#v, want %#v", typ, got, want)
		}
	}
}

func TestPayloadKeepsDigits(t *testing.T) {
	const args = `{"id": 12345678901234567890, "limit":128000.0, "text":"<&>\u00e9"}`
	e := Event{Type: EventToolExecutionStart, Data: json.RawMessage(`{"toolCallId":"c","toolName":"t","arguments":` + args + `}`)}
	p, ok := e.Payload().(*ToolExecutionStart)
	if !ok || string(p.Arguments) != args {
		t.Errorf("payload is %#v, want arguments %s", e.Payload(), args)
	}
}

func TestEventDecode(t *testing.T) {
	type mode struct{ Mode string }
	tests := []struct {
		name, data string
		want       mode
	}{
		{"object", `{"mode":"plan","content":"x"}`, mode{"plan"}},
		{"absent", ``, mode{}},
		{"null", `null`, mode{}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var got *mode // null must not leave it nil
			err := Event{Type: EventSessionModeNoticeDelivered, Data: json.RawMessage(tt.data)}.Decode(&got)
			if err != nil || got == nil || *got != tt.want {
				t.Errorf("got %+v, error %v; want %+v", got, err, tt.want)
			}
		})
	}

	bad := Event{Type: EventSessionModeNoticeDelivered, Data: json.RawMessage(`{"mode":1}`)}
	var kind *json.UnmarshalTypeError
	if err := bad.Decode(new(mode)); !errors.As(err, &kind) {
		t.Errorf("number for a string: error is %v, want a *json.UnmarshalTypeError", err)
	}
	for _, v := range []any{nil, mode{}, (*mode)(nil)} {
		var misfit *DecodeError
		if err := bad.Decode(v); !errors.As(err, &misfit) {
			t.Errorf("into %#v: error is %v, want a *DecodeError", v, err)
		}
	}
}

func TestDecodeErrorIsShort(t *testing.T) {
	long := strings.Repeat("9é", 1<<18)
	for _, data := range []string{`{"startTime":"` + long + `"}`, `{"version":` + strings.Repeat("9", 1<<18) + `}`} {
		raw, ok := Event{Type: EventSessionStart, Data: json.RawMessage(data)}.Payload().(*RawPayload)
		if !ok || raw.Err == nil {
			t.Fatalf("%.40s... fits", data)
		}
		if n := len(raw.Err.Error()); n > 512 {
			t.Errorf("the error for %.40s... is %d bytes long", data, n)
		}
	}
	err := Event{Type: EventType(long), Data: json.RawMessage(`1`)}.Decode(&struct{}{})
	if n := len(err.Error()); n > 512 {
		t.Errorf("the error for a long type is %d bytes long", n)
	}
}

func FuzzPayload(f *testing.F) {
	for typ := range eventConstants(f) {
		data := []byte(`{"content":"x","requestId":1,"arguments":{"a":1.0},"startTime":"2026-01-02T03:04:05.678Z"}`)
		if p := newPayload(typ); p != nil {
			data, _ = json.Marshal(p)
		}
		f.Add(string(typ), data)
	}
	f.Fuzz(func(t *testing.T, typ string, data []byte) {
		e := Event{Type: EventType(typ), Data: bytes.Clone(data)}
		p := e.Payload()
		if !bytes.Equal(e.Data, data) {
			t.Fatal("the data was changed")
		}
		if raw, ok := p.(*RawPayload); ok {
			if raw.Type != e.Type || !bytes.Equal(raw.Data, data) {
				t.Fatalf("raw payload is %#v", raw)
			}
			if (raw.Err != nil) != (newPayload(e.Type) != nil) {
				t.Fatalf("error is %v", raw.Err)
			}
			return
		}
		// What was decoded can be encoded, and from then on it stays the same. (The first time, spelling is lost.)
		again := func(p Payload) Payload {
			data, err := json.Marshal(p)
			if err != nil {
				t.Fatal(err)
			}
			return Event{Type: e.Type, Data: data}.Payload()
		}
		second := again(p)
		if third := again(second); !reflect.DeepEqual(second, third) {
			t.Fatalf("got %+v, want %+v", third, second)
		}
	})
}

// transcriptLine is one recorded message.
type transcriptLine struct {
	File string          `json:"file"` // the recording, without extension
	Dir  string          `json:"dir"`  // c2s or s2c
	Conn json.RawMessage `json:"conn"` // which connection, in recordings with several
	Msg  json.RawMessage `json:"msg"`
}

// readTranscripts returns the recorded traffic of CLI 1.0.102, in order, file by file. Long strings in it are cut.
func readTranscripts(t testing.TB) []transcriptLine {
	t.Helper()
	f, err := os.Open(filepath.Join("testdata", "transcripts.jsonl.gz"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var lines []transcriptLine
	for d := json.NewDecoder(bufio.NewReader(z)); ; {
		var line transcriptLine
		switch err := d.Decode(&line); err {
		case nil:
			lines = append(lines, line)
		case io.EOF:
			return lines
		default:
			t.Fatal(err)
		}
	}
}

func TestReplayTranscripts(t *testing.T) {
	type wireEvent struct {
		ID   string          `json:"id"`
		Type EventType       `json:"type"`
		Data json.RawMessage `json:"data"`
	}
	constants := eventConstants(t)
	files, events, typed := make(map[string]bool), 0, make(map[EventType]int)
	for _, line := range readTranscripts(t) {
		files[line.File] = true
		var msg struct {
			Method string
			Params struct{ Event *wireEvent }
			Result struct{ Events []wireEvent }
		}
		// Results of other calls may have another shape; events are all that matters here.
		if err := json.Unmarshal(line.Msg, &msg); err != nil && msg.Method == "session.event" {
			t.Errorf("%s: %v", line.File, err)
		}
		found := msg.Result.Events
		if msg.Method == "session.event" {
			if msg.Params.Event == nil {
				t.Fatalf("%s: session.event without event: %.200s", line.File, line.Msg)
			}
			found = append(found, *msg.Params.Event)
		}
		for _, w := range found {
			events++
			if constants[w.Type] == "" {
				t.Errorf("%s: no constant for event type %q", line.File, w.Type)
			}
			switch p := (Event{ID: w.ID, Type: w.Type, Data: w.Data}).Payload().(type) {
			case *RawPayload:
				if p.Err != nil {
					t.Errorf("%s: event %s: %v", line.File, w.ID, p.Err)
				}
			default:
				typed[w.Type]++
			}
		}
	}
	if len(files) < 60 || events < 5000 || len(typed) < 50 {
		t.Errorf("only %d recordings, %d events, %d types with payload type: where is the rest?", len(files), events, len(typed))
	}
	t.Logf("%d events of %d recordings; %d payload types seen", events, len(files), len(typed))
}

// liveOnly lists members that CLI 1.0.102 was seen to send and its published schema (of 1.0.89-7) lacks.
var liveOnly = map[string]string{
	"session.start.githubMcpToolConfig.disableFormDeferral": "a member of the type that session.create takes",
	"session.error.originatingMessageId":                    "tells whose run failed; needed to end the right turn",
	"session.compaction_start.compactionAttemptId":          "ties the end to its start",
	"session.compaction_complete.compactionAttemptId":       "ties the end to its start",
	"session.compaction_complete.outcome":                   "finer than success",
	"session.mcp_server_status_changed.configSource":        "where the server was configured",
	"assistant.usage.modelDisplayName":                      "for display",
	"assistant.usage.providerType":                          "tells BYOK providers apart",
	"model.call_failure.retryAttempt":                       "counts the tries",
	"tool.execution_complete.fileEdits":                     "which files a tool wrote",
	"permission.requested.ownerSessionId":                   "whose permission it is, with sub-sessions",
	"elicitation.requested.elicitationId":                   "identifies a url elicitation to its MCP server",
	"exit_plan_mode.requested.toolCallId":                   "the tool call that waits",
	"mcp.oauth_required.runtimeRefreshSupported":            "whether the runtime renews tokens by itself",
	"sampling.requested.request":                            "the request itself, which the schema forgot",
}

// schemaFile is a JSON schema with its definitions.
type schemaFile map[string]any

// alternatives follows references and unions to the plain schemas that a value may match; null is none of them.
func (s schemaFile) alternatives(node map[string]any) []map[string]any {
	if ref, ok := node["$ref"].(string); ok {
		name := strings.TrimPrefix(ref, "#/definitions/")
		return s.alternatives(s["definitions"].(map[string]any)[name].(map[string]any))
	}
	for _, union := range []string{"anyOf", "oneOf", "allOf"} {
		if list, ok := node[union].([]any); ok {
			var all []map[string]any
			for _, alt := range list {
				all = append(all, s.alternatives(alt.(map[string]any))...)
			}
			return all
		}
	}
	if node["type"] == "null" {
		return nil
	}
	return []map[string]any{node}
}

// schemaKinds returns the JSON types of a plain schema but null; none means any.
func schemaKinds(node map[string]any) []string {
	var kinds []string
	switch typ := node["type"].(type) {
	case string:
		kinds = append(kinds, typ)
	case []any:
		for _, k := range typ {
			if k != "null" {
				kinds = append(kinds, k.(string))
			}
		}
	}
	return kinds
}

// conformance compares Go types with a schema.
type conformance struct {
	t      *testing.T
	schema schemaFile
	listed map[string]string // known differences, with the reason
	used   map[string]bool   // those that were met
}

// differs reports whether a difference is listed.
func (c *conformance) differs(at string) bool {
	c.used[at] = true
	return c.listed[at] != ""
}

// finish reports differences that are listed without need.
func (c *conformance) finish() {
	for at := range c.listed {
		if !c.used[at] {
			c.t.Errorf("%s is listed as different from the schema, and is not", at)
		}
	}
}

// check reports where typ cannot take what node describes. path is the wire name of the value.
func (c *conformance) check(path string, typ reflect.Type, node map[string]any) {
	if typ == reflect.TypeFor[json.RawMessage]() {
		return
	}
	if typ.Kind() == reflect.Pointer {
		typ = typ.Elem()
	}
	want, kind := "", typ.Kind()
	switch {
	case typ == reflect.TypeFor[time.Time](), kind == reflect.String:
		want = "string"
	case kind == reflect.Bool:
		want = "boolean"
	case kind == reflect.Int, kind == reflect.Int64:
		want = "integer"
	case kind == reflect.Float64:
		want = "number"
	case kind == reflect.Slice:
		want = "array"
	case kind == reflect.Map, kind == reflect.Struct:
		want = "object"
	default:
		c.t.Errorf("%s: what is a %s on the wire?", path, typ)
		return
	}
	alternatives := c.schema.alternatives(node)
	if len(alternatives) == 0 {
		c.t.Errorf("%s: the schema allows only null", path)
	}
	for _, alt := range alternatives {
		kinds := schemaKinds(alt)
		for _, k := range kinds {
			if k != want && !(k == "integer" && want == "number") {
				c.t.Errorf("%s: %s cannot take a %s", path, typ, k)
			}
		}
		if len(kinds) == 0 {
			c.t.Errorf("%s: %s cannot take any value", path, typ)
		}
		if typ == reflect.TypeFor[time.Time]() && alt["format"] != "date-time" && !c.differs(path) {
			c.t.Errorf("%s: format is %v, want date-time", path, alt["format"])
		}
		if kind == reflect.Slice {
			c.check(path+"[]", typ.Elem(), alt["items"].(map[string]any))
		}
		if kind == reflect.Map {
			c.check(path+".*", typ.Elem(), alt["additionalProperties"].(map[string]any))
		}
	}
	if want != "object" || kind == reflect.Map {
		return
	}
	for name, f := range fields(typ) {
		var found []any // one struct may serve several alternatives, and so may the structs in it
		for _, alt := range alternatives {
			properties, _ := alt["properties"].(map[string]any)
			if p, ok := properties[name]; ok {
				found = append(found, p)
			}
		}
		at := path + "." + name
		switch {
		case len(found) > 0:
			c.check(at, f.Type, map[string]any{"anyOf": found})
		case !c.differs(at):
			c.t.Errorf("%s: not in the schema", at)
		}
	}
}

func TestSchemaConformance(t *testing.T) {
	dir := os.Getenv("COPILOT_SCHEMA_DIR")
	if dir == "" {
		t.Skip("skipped: COPILOT_SCHEMA_DIR is not set, so there is no schema to compare with")
	}
	text, err := os.ReadFile(filepath.Join(dir, "session-events.schema.json"))
	if err != nil {
		t.Fatal(err)
	}
	var schema schemaFile
	if err := json.Unmarshal(text, &schema); err != nil {
		t.Fatal(err)
	}
	constants := eventConstants(t)
	c := &conformance{t: t, schema: schema, listed: liveOnly, used: make(map[string]bool)}
	types, typed := make(map[EventType]bool), 0
	for _, event := range schema.alternatives(schema) {
		properties := event["properties"].(map[string]any)
		typ := EventType(properties["type"].(map[string]any)["const"].(string))
		types[typ] = true
		if constants[typ] == "" {
			t.Errorf("no constant for %q", typ)
		}
		if p := newPayload(typ); p != nil {
			typed++
			c.check(string(typ), reflect.TypeOf(p), properties["data"].(map[string]any))
		}
	}
	var unlisted []string
	for typ := range constants {
		if !types[typ] {
			unlisted = append(unlisted, string(typ))
			if newPayload(typ) != nil {
				t.Errorf("%q has a payload type, but is not in the schema", typ)
			}
		}
	}
	c.finish()
	slices.Sort(unlisted)
	t.Logf("typed: %d of the schema's %d event types (%d%%)", typed, len(types), 100*typed/len(types))
	t.Logf("constants for %d types that are not in the schema: %s", len(unlisted), strings.Join(unlisted, ", "))
}
